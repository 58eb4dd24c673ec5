"""What an offloader's callers hold: a tensor or an encoding, wherever its bytes are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gistkit.codecs import Encoded
from gistkit.runtime.offload.records import Record, State, versions_of

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
        return 0 if self._record.span is None else self._record.span.stop - self._record.span.start

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
