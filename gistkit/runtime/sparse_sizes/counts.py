"""Counts on their way from the device to the host, without anybody waiting for them: how many elements a sparse
encoding stores is copied to pinned memory behind the encode, with an event behind the copy."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.kernels import current_stream
from gistkit.runtime.offload.host_memory import pinned

PINNED_SLOTS = 64


class PinnedCounts:
    """Counts of one CUDA stream through pinned int64 slots, with an event each. A slot whose ticket was dropped early
    is free at once: what the stream writes there for the next owner comes after what it still has to write for the last
    one, and the next owner's event after both."""

    def __init__(self) -> None:
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._stream: torch.cuda.Stream | None = None

    def open(self, device: torch.device) -> PinnedTicket:
        """A ticket whose ``slot`` the work that is enqueued next on the current stream may write."""
        if not self._free:
            self._stream = torch.cuda.current_stream(device)
            # 16 bytes each, as ready launches want them (gistkit.kernels.launch.tiling)
            slots = pinned(16 * PINNED_SLOTS, device).view(torch.int64).view(PINNED_SLOTS, 2)
            self._free.extend((slot, torch.cuda.Event()) for slot in slots[:, 0].unbind())
        return PinnedTicket(self._free, *self._free.pop(), self._stream)

    def send(self, total: torch.Tensor) -> PinnedTicket:
        """Start the transfer of a 0-d int64 tensor behind the work that the current stream holds. Does not wait."""
        ticket = self.open(total.device)
        ticket.slot.copy_(total, non_blocking=True)
        ticket.sent()
        return ticket


class PinnedTicket:
    """One count on its way to the host; :meth:`sent` is called behind the work that writes its ``slot``."""

    __slots__ = ("_event", "_free", "_stream", "slot")

    def __init__(self, free: list, slot: torch.Tensor, event: torch.cuda.Event, stream: Any) -> None:
        self._free, self.slot, self._event, self._stream = free, slot, event, stream

    def sent(self) -> None:
        self._event.record(self._stream)

    def ready(self) -> int | None:
        """The count, or None while it has not arrived. Does not wait."""
        return int(self.slot) if self._event.query() else None

    def wait(self) -> int:
        self._event.synchronize()
        return int(self.slot)

    def __del__(self) -> None:
        self._free.append((self.slot, self._event))


Stream = tuple[int, int] | None
"""A device's number and its stream's; None on a CPU."""


def stream_of(x: torch.Tensor) -> Stream:
    """The stream on which work on x is enqueued now."""
    if not x.is_cuda:
        return None
    device = x.get_device()
    return device, current_stream(device)


def is_current(stream: Stream) -> bool:
    """Whether work is enqueued on that stream now."""
    return stream is None or current_stream(stream[0]) == stream[1]
