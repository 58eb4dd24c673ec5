"""What the offloader knows of one parcel: where its bytes lie, and in which state it is."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from gistkit.errors import OffloadError
from gistkit.runtime.offload.arena import Span, aligned_bytes
from gistkit.runtime.offload.backends import Event, Stream


class State(Enum):
    """Where a parcel's bytes are."""

    OUTGOING = "on their way to the host, the source alive on the device"
    HOST = "on the host alone"
    ARRIVING = "on their way to the device"
    HERE = "on the device"
    ENDED = "nowhere, as nobody holds the parcel"


_ALLOWED = {
    State.OUTGOING: (State.HOST, State.HERE, State.ENDED),
    State.HOST: (State.ARRIVING, State.ENDED),
    State.ARRIVING: (State.HERE,),
    State.HERE: (State.ENDED,),
    State.ENDED: (),
}


class Part(NamedTuple):
    """One dense tensor within a run of bytes that begins ``start`` bytes before it."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that lies in uint8 memory; no copy and no view, so that it has a version of its own."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        start = (memory.storage_offset() + self.start) // self.dtype.itemsize
        return made.set_(memory.untyped_storage(), start, self.shape, self.stride)


def laid_out(tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Part, ...], int]:
    """Parts of dense tensors one after the other from multiples of 512 bytes on, and the bytes of all,
    no less than 1."""
    parts, end = [], 0
    for t in tensors:
        start = aligned_bytes(end)
        parts.append(Part(start, t.shape, t.stride(), t.dtype))
        end = start + t.numel() * t.element_size()
    return tuple(parts), max(end, 1)


class Record:
    """One parcel. ``stream`` is the compute stream of its put: the source's memory and that of the arrival are of its
    pool. ``tensors`` are those on the device, the source or the arrival; ``versions`` the source's at the put."""

    __slots__ = ("arrived", "buffer", "fault", "nbytes", "parts", "span", "state", "stream", "tensors", "versions")

    def __init__(self, stream: Stream, tensors: tuple[torch.Tensor, ...]) -> None:
        self.stream = stream
        self.parts, self.nbytes = laid_out(tensors)
        self.tensors = tensors
        self.versions = versions_of(tensors)
        self.state = State.OUTGOING
        self.span: Span | None = None
        self.buffer: torch.Tensor | None = None
        self.arrived: tuple[int, Event] | None = None  # fetches in order, and the event of this one
        self.fault = ""

    def move(self, to: State) -> None:
        """Change the state. Raises OffloadError for a change that cannot be: a defect of the offloader."""
        if to not in _ALLOWED[self.state]:
            raise OffloadError(
                f"offload: a parcel of {self.nbytes} bytes goes from {self.state.name} to {to.name}, allowed is "
                f"{', '.join(s.name for s in _ALLOWED[self.state]) or 'nothing'}; this is a defect of gistkit"
            )
        self.state = to

    def check_source(self) -> None:
        """Note where the source was written to since the put: the copy may hold either values."""
        if versions_of(self.tensors) != self.versions:
            self.fault = (
                "one of the variables needed for gradient computation has been modified by an inplace operation while "
                f"it was on its way to the host: versions {versions_of(self.tensors)}, expected {self.versions}"
            )


def versions_of(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Version counters; -1 for tensors of the inference mode, which have none."""
    return tuple([-1 if t.is_inference() else t._version for t in tensors])
