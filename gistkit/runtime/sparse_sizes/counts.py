"""Counts on their way from the device to the host, without anybody waiting for them.

How many elements a sparse encoding stores is a sum on the device. It is copied to pinned memory behind the encode, and
an event is recorded behind the copy; whoever wants the number asks whether the event is done.
"""

from __future__ import annotations

import torch

PINNED_SLOTS = 64


class Known:
    """A count that the host has."""

    def __init__(self, value: int) -> None:
        self._value = value

    def ready(self) -> int:
        return self._value

    def wait(self) -> int:
        return self._value


class PinnedCounts:
    """Counts of one CUDA stream through pinned int64 slots, with an event each.

    A slot whose ticket was dropped early is free at once: what the stream writes there for the next owner comes after
    what it still has to write for the last one, and the next owner's event after both.
    """

    def __init__(self) -> None:
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def send(self, total: torch.Tensor) -> PinnedTicket:
        """Start the transfer of a 0-d int64 tensor behind the work that the current stream holds. Does not wait."""
        if not self._free:
            slots = torch.empty(PINNED_SLOTS, dtype=torch.int64, pin_memory=True)
            self._free.extend((slot, torch.cuda.Event()) for slot in slots.unbind())
        slot, event = self._free.pop()
        slot.copy_(total, non_blocking=True)
        event.record(torch.cuda.current_stream(total.device))
        return PinnedTicket(self._free, slot, event, total)


class PinnedTicket:
    """One count on its way to the host."""

    def __init__(self, free: list, slot: torch.Tensor, event: torch.cuda.Event, total: torch.Tensor) -> None:
        self._free, self._slot, self._event = free, slot, event
        self._source = total  # alive until the copy is done

    def ready(self) -> int | None:
        """The count, or None while it has not arrived. Does not wait."""
        return int(self._slot) if self._event.query() else None

    def wait(self) -> int:
        """The count, after waiting for it."""
        self._event.synchronize()
        return int(self._slot)

    def __del__(self) -> None:
        self._free.append((self._slot, self._event))


Ticket = PinnedTicket | Known


def stream_of(x: torch.Tensor) -> torch.cuda.Stream | None:
    """The stream on which work on x is enqueued now; None on a CPU."""
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def is_current(stream: torch.cuda.Stream | None) -> bool:
    """Whether work is enqueued on that stream now."""
    return stream is None or torch.cuda.current_stream(stream.device) == stream
