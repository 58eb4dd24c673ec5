"""What the offloader knows of one parcel: where its bytes lie, and in which state it is."""

from __future__ import annotations

from enum import Enum
from operator import attrgetter

import torch

from gistkit.errors import OffloadError
from gistkit.runtime.offload.arena import Span
from gistkit.runtime.offload.backends import Event, Stream
from gistkit.runtime.offload.lanes import Shipment
from gistkit.runtime.offload.parts import PART_ALIGNMENT_BYTES, laid_out


class State(Enum):
    """Where a parcel's bytes are. ``next``: the states that may follow."""

    next: tuple[State, ...]

    OUTGOING = "on their way to the host, the source alive on the device"
    HOST = "on the host alone"
    ARRIVING = "on their way to the device"
    HERE = "on the device"
    ENDED = "nowhere, as nobody holds the parcel"


State.OUTGOING.next = (State.HOST, State.HERE, State.ENDED)
State.HOST.next = (State.ARRIVING, State.ENDED)
State.ARRIVING.next = (State.HERE,)
State.HERE.next = (State.ENDED,)
State.ENDED.next = ()


class Record:
    """One parcel: ``nbytes`` on the device as ``tensors``, the source or the arrival, whose memory is of the pool of
    ``stream``, the compute stream of the put. ``parts`` lie in the span, ``span_bytes`` of it; what is packed on the
    way lies elsewhere (``shipment``). ``versions`` are the source's at the put."""

    __slots__ = (
        "arrived", "buffer", "fault", "nbytes", "parts", "shipment", "span", "span_bytes", "state", "stream", "tensors",
        "versions",
    )  # fmt: skip

    def __init__(self, stream: Stream, tensors: tuple[torch.Tensor, ...], shipment: Shipment | None = None) -> None:
        self.stream, self.tensors, self.shipment = stream, tensors, shipment
        if shipment is None:
            self.parts, self.span_bytes = laid_out(tensors)
            self.nbytes = self.span_bytes
        else:
            self.parts, self.span_bytes = laid_out(shipment.kind.rest(tensors))
            self.nbytes = laid_out(tensors)[1]
        self.versions = versions_of(tensors)
        self.state = State.OUTGOING
        self.span: Span | None = None
        self.buffer: torch.Tensor | None = None
        self.arrived: tuple[int, Event] | None = None  # fetches in order, and the event of this one
        self.fault = ""

    @property
    def packed_start(self) -> int:
        """The byte of an arrival where what was packed begins."""
        return -(-self.span_bytes // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES

    @property
    def arrival_bytes(self) -> int:
        """Bytes of the device's memory that it comes back to."""
        return self.span_bytes if self.shipment is None else self.packed_start + self.shipment.run_bytes

    def arrival(self) -> tuple[torch.Tensor, ...]:
        """The tensors that have arrived in the buffer."""
        assert self.buffer is not None
        if len(self.parts) == 1 and self.shipment is None:
            return (self.parts[0].over(self.buffer),)
        tensors = tuple([part.over(self.buffer) for part in self.parts])
        if self.shipment is None:
            return tensors
        return self.shipment.payload(tensors, self.buffer, self.packed_start)

    def move(self, to: State) -> None:
        """Change the state. Raises OffloadError for a change that cannot be: a defect of the offloader."""
        if to not in self.state.next:
            raise OffloadError(
                f"offload: a parcel of {self.nbytes} bytes goes from {self.state.name} to {to.name}, allowed is "
                f"{', '.join(s.name for s in self.state.next) or 'nothing'}; this is a defect of gistkit"
            )
        self.state = to

    def note_fault(self) -> None:
        """The source was written to since the put: the copy may hold either values."""
        self.fault = (
            "one of the variables needed for gradient computation has been modified by an inplace operation while "
            f"it was on its way to the host: versions {versions_of(self.tensors)}, expected {self.versions}"
        )


_VERSION = attrgetter("_version")


def versions_of(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Version counters; -1 for tensors of the inference mode, which have none."""
    try:
        return tuple(map(_VERSION, tensors))
    except RuntimeError:
        return tuple([-1 if t.is_inference() else t._version for t in tensors])
