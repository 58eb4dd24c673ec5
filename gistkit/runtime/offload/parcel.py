"""What an offloader's callers hold: a tensor or an encoding, wherever its bytes are; and what the offloader knows of
it: where these lie, and in which state it is."""

from __future__ import annotations

from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from gistkit.codecs import Encoded
from gistkit.errors import OffloadError
from gistkit.runtime.offload.arena import Span
from gistkit.runtime.offload.backends import Event, Stream
from gistkit.runtime.offload.lanes import Shipment
from gistkit.runtime.offload.parts import laid_out


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
    ``stream``, the compute stream of the put. ``parts`` lie in the span; what is packed on the way lies in a lane
    (``shipment``). ``versions`` are the source's at the put."""

    __slots__ = (
        "arrived", "buffer", "fault", "nbytes", "parts", "shipment", "span", "state", "stream", "tensors", "versions",
    )  # fmt: skip

    def __init__(self, stream: Stream, tensors: tuple[torch.Tensor, ...], shipment: Shipment | None = None) -> None:
        self.stream, self.tensors, self.shipment = stream, tensors, shipment
        self.parts, self.nbytes = laid_out(tensors) if shipment is None else ((), shipment.kind.source_bytes)
        self.versions = versions_of(tensors)
        self.state = State.OUTGOING
        self.span: Span | None = None
        self.buffer: torch.Tensor | None = None
        self.arrived: tuple[int, Event] | None = None  # fetches in order, and the event of this one
        self.fault = ""

    def arrival(self) -> tuple[torch.Tensor, ...]:
        buffer = self.buffer
        assert buffer is not None
        if self.shipment is not None:
            return self.shipment.payload(buffer)
        return tuple([part.over(buffer) for part in self.parts])

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


if TYPE_CHECKING:
    from gistkit.runtime.offload.offloader import Offloader


class Parcel:
    """What was put. The host memory is free again once the parcel has been got or dropped, the device's once the parcel
    and the tensors that it gave are dropped."""

    __slots__ = ("__weakref__", "_form", "_offloader", "_record")

    def __init__(self, offloader: Offloader, record: Record, form: Encoded | None) -> None:
        self._offloader, self._record, self._form = offloader, record, form

    @property
    def form(self) -> Encoded:
        """The encoding that was put, without its payload."""
        assert self._form is not None
        return self._form

    @property
    def state(self) -> State:
        return self._record.state

    @property
    def device_bytes(self) -> int:
        """Bytes that it keeps on the device now."""
        return 0 if self._record.state is State.HOST else self._record.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes that it keeps on the host now."""
        span, shipment = self._record.span, self._record.shipment
        if shipment is not None:
            return 0 if shipment.ended else shipment.nbytes
        return 0 if span is None else span.stop - span.start

    def release(self) -> None:
        """Let go of the source, and of those put before it: work of the compute stream from now on waits for their
        copies, and may use their memory."""
        self._offloader.release(self._record)

    def stored(self) -> int | None:
        """How many elements a sparse encoding stores; None while the host does not know, and of others."""
        known = None if self._form is None else self._form.nonzeros
        return known if self._record.shipment is None else self._offloader.stored(self._record)

    def prefetch(self) -> bool:
        """Begin to fetch it, for a :meth:`get` that comes later; whether it is on its way, or there. False: arrivals in
        flight or the device leave no room now, and it is fetched when they do. Raises OffloadError after a close."""
        return self._offloader.prefetch(self._record)

    def get(self) -> Any:
        """The tensor, or the encoding, for work enqueued on the current stream from now on; every call the same.

        On the stream of the put these are the parcel's own tensors, elsewhere copies. Raises RuntimeError, as PyTorch
        does, where the source was written to before its copy was known to be done; OffloadError after a close.
        """
        tensors = self._offloader.get(self._record)
        if self._form is None:
            return tensors[0]
        encoded = self._form.over(tensors, versions_of(tensors) if self._form.extra else None)
        shipment = self._record.shipment
        if shipment is not None and self._record.arrived is not None:
            encoded.settle(tensors, shipment.total)
        return encoded

    def __del__(self) -> None:
        record = self._record
        if record.state is State.HERE:
            record.tensors = ()
        self._offloader.forget(record)
