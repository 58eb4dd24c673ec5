"""Tensors that spend the time between their two uses on the host, copied beside the computation (vDNN section III-B,
without a wait of the host's). Two copy streams run beside the compute stream, and every dependence between the three is
one event: docs/runtime.md, "The offloader", has a table of them.

*Memory.* PyTorch's allocator knows one stream a block, that which was current when the block was made. Every block here
is of the compute stream's pool. It may be let go of once that stream has waited for the copy, or once the host has seen
the copy's event done; until then the offloader keeps it alive.

*Run-ahead.* Sources in flight are bounded in bytes (``run_ahead_bytes``): beyond that the compute stream waits for the
oldest.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from gistkit.codecs import Encoded
from gistkit.errors import OffloadError
from gistkit.kernels import current_device, is_dense
from gistkit.runtime.offload.arena import PinnedArena
from gistkit.runtime.offload.backends import Backend, Event, Stream
from gistkit.runtime.offload.lanes import Lanes
from gistkit.runtime.offload.parcel import Parcel, Record, State, versions_of
from gistkit.runtime.offload.parts import Bytes, LayOut, laid_out


class Offloader:
    """Sends tensors to the host and fetches them again; safe to use from several threads.

    ``arena_bytes`` of host memory are pinned at once. ``run_ahead_bytes`` bounds the sources whose copies are in
    flight: 0 lets every source go at once, and the compute stream then waits for each copy. ``arrival_bytes`` bounds
    what is prefetched and not yet taken. ``lane_bytes`` is the length of a lane, a part of the arena in which sparse
    encodings of unknown size lie close together (:mod:`gistkit.runtime.offload.lanes`). Raises HostMemoryError where
    the host has no room.
    """

    def __init__(
        self, backend: Backend, arena_bytes: int, run_ahead_bytes: int, arrival_bytes: int, lane_bytes: int = 0
    ) -> None:
        self.backend, self._index = backend, backend.device.index
        self.arena = PinnedArena(backend, arena_bytes)
        self.lanes = Lanes(backend, self.arena, lane_bytes)
        self._run_ahead_bytes, self._arrival_bytes = run_ahead_bytes, arrival_bytes
        self._outgoing: deque[_Outgoing] = deque()
        self._queue: deque[Record] = deque()
        self._ended: deque[Record] = deque()
        self.forget = self._ended.append
        """Called with the record of a parcel that nobody holds any more, by a finaliser: in any thread and at any
        moment, so without a lock."""
        self._fetches = 0
        self._last_read: tuple[int, Event] | None = None
        self._lock = threading.RLock()
        self.outgoing_bytes = 0
        """Bytes of sources that are kept alive for their copies."""
        self.arriving_bytes = 0
        """Bytes of arrivals that nobody has taken."""
        self._open = True
        self._closed = weakref.finalize(self, _close, backend, self.arena)
        self._closed.atexit = False  # a process that ends gives its memory back by itself

    def put(self, what: torch.Tensor | Encoded) -> Parcel:
        """Send a tensor, or an encoding's payload, as it is now; the caller lets go of it.

        Its memory must be of the current stream's pool. Raises HostMemoryError where the host has no room: nothing has
        happened then. A pending encoding goes in the bytes that it needs, if its values are packed one by one.
        """
        with self._locked():
            if not self._open:
                raise _shut()
            while self._ended:
                self._end(self._ended.popleft())
            form = shipment = None
            if isinstance(what, Encoded):
                form, (tensors, pending, spill) = what.over(()), what.state()
                if pending and spill is None:
                    shipment = self.lanes.shipment(what.codec, tensors)
                if shipment is None:
                    tensors = tuple([_dense(t) for t in tensors])
            else:
                tensors = (_dense(what),)
            record = Record(self.backend.compute(), tensors, shipment)
            if shipment is None:
                record.span = self.arena.take(record.nbytes)
            try:
                self._send(record)
            except BaseException:
                self._give_span(record)
                raise
            while self._outgoing and self.backend.done(self._outgoing[0].sent):
                self._let_go()
            while self.outgoing_bytes > self._run_ahead_bytes:
                self._wait_for_oldest()
        return Parcel(self, record, form)

    def trim(self, limit_bytes: int) -> None:
        """Let go of the oldest sources until no more than ``limit_bytes`` are kept alive. The compute stream waits for
        their copies, so what it holds next may use their memory."""
        with self._locked():
            self._collect()
            while self.outgoing_bytes > limit_bytes:
                self._wait_for_oldest()

    def release(self, record: Record) -> None:
        if record.state is State.OUTGOING:
            with self._locked():
                self._collect()
                while record.state is State.OUTGOING:
                    self._wait_for_oldest()

    def stored(self, record: Record) -> int | None:
        with self._locked():
            shipment = record.shipment
            assert shipment is not None
            if self._open:
                shipment.known()
            return shipment.total

    def close(self) -> None:
        """Wait for the copies and unpin the host memory. Parcels that are on the host alone are lost."""
        with self._locked():
            self._open = False
            self._closed()
            while self._outgoing:
                self._let_go()
            self._queue.clear()
            self.lanes.clear()

    def _send(self, record: Record) -> None:
        backend, span, shipment = self.backend, record.span, record.shipment
        backend.follow(backend.d2h, record.stream)
        if self._last_read is not None:
            backend.wait(backend.d2h, self._last_read[1])
            self._last_read = None
        if shipment is not None:
            shipment.ship(record.tensors)
        else:
            assert span is not None
            backend.run(backend.d2h, LayOut(record.parts, span.start), span.chunk.memory, *record.tensors)
        sent = backend.record(backend.d2h)
        if shipment is not None:
            shipment.sent = sent
        self._outgoing.append(_Outgoing(record, record.tensors, sent))
        self.outgoing_bytes += record.nbytes

    def _wait_for_oldest(self) -> None:
        """The compute stream waits for the oldest copy, and its source goes."""
        sending = self._outgoing[0]
        self.backend.wait(sending.record.stream, sending.sent)
        self._let_go()

    def _let_go(self) -> None:
        """Of the oldest source, whose copy the compute stream or the host has waited for."""
        record = self._outgoing.popleft().record
        self.outgoing_bytes -= record.nbytes
        if record.state is State.OUTGOING:
            if versions_of(record.tensors) != record.versions:
                record.note_fault()
            record.move(State.HOST)
            record.tensors = ()

    def _collect(self) -> None:
        """Take in what has happened since the last call: copies that are done, parcels that nobody holds."""
        while self._outgoing and self.backend.done(self._outgoing[0].sent):
            self._let_go()
        while self._ended:
            self._end(self._ended.popleft())

    def _end(self, record: Record) -> None:
        if record.state is State.ARRIVING:
            self._take(record)
        record.move(State.ENDED)
        record.tensors = ()
        self._give_span(record)

    def _give_span(self, record: Record) -> None:
        """What is sent there next overwrites it: behind the fetch from it, if there was one."""
        span, shipment, arrived = record.span, record.shipment, record.arrived
        if shipment is not None and not shipment.ended:
            shipment.ended = True
        elif span is not None:
            record.span = None
            span.chunk.give(span.start, span.stop)
        else:
            return
        if arrived is not None and (self._last_read is None or self._last_read[0] < arrived[0]):
            self._last_read = arrived

    def prefetch(self, record: Record) -> bool:
        with self._locked():
            if self._outgoing or self._ended:
                self._collect()
            if record.state is State.OUTGOING:
                self._take_source(record)
            if record.state is State.HOST and not self._open:
                raise _shut()
            if self._queue:
                if record.state is State.HOST and record not in self._queue:
                    self._queue.append(record)
                self._fetch_queued()
            elif record.state is State.HOST and not self._fetched(record):
                self._queue.append(record)
            return record.state is not State.HOST

    def get(self, record: Record) -> tuple[torch.Tensor, ...]:
        with self._locked():
            if self._outgoing or self._ended:
                self._collect()
            if record.state is State.OUTGOING:
                self._take_source(record)
            if record.state is State.HOST:
                if not self._open:
                    raise _shut()
                if record.shipment is not None:
                    record.shipment.known()  # which makes it as small as what is stored
                    record.nbytes = record.shipment.nbytes
                self._fetch(record)
            if record.state is State.ARRIVING:
                self._take(record)
            if record.versions and versions_of(record.tensors) != record.versions:
                record.note_fault()
            if record.fault:
                raise RuntimeError(record.fault)
            stream = self.backend.compute()
            tensors = record.tensors if stream == record.stream else self._on_stream(record, stream)
            if self._queue:
                self._fetch_queued()
            return tensors

    def _take_source(self, record: Record) -> None:
        """The source has not gone yet: it stays, and its copy is not wanted any more."""
        record.move(State.HERE)
        self._give_span(record)

    def _fetch_queued(self) -> None:
        """Begin the fetches that were put off, oldest first, as far as there is room for them."""
        while self._queue and (self._queue[0].state is not State.HOST or self._fetched(self._queue[0])):
            self._queue.popleft()

    def _fetched(self, record: Record) -> bool:
        """Begin to fetch what is on the host, where its size is known and there is room for it; whether that was so."""
        shipment = record.shipment
        if shipment is not None:
            if not shipment.known():
                return False
            record.nbytes = shipment.nbytes
        if self.arriving_bytes and self.arriving_bytes + record.nbytes > self._arrival_bytes:
            return False
        try:
            self._fetch(record)
        except torch.OutOfMemoryError:  # get() tries again, and says so
            return False
        return True

    def _fetch(self, record: Record) -> None:
        backend, span, shipment = self.backend, record.span, record.shipment
        buffer = backend.empty(record.nbytes, record.stream)
        backend.follow(backend.h2d, record.stream)
        if shipment is not None:
            shipment.fetch(buffer)
        else:
            assert span is not None
            backend.run(backend.h2d, Bytes(span.start, record.nbytes), buffer, span.chunk.memory)
        self._fetches += 1
        record.buffer, record.arrived = buffer, (self._fetches, backend.record(backend.h2d))
        record.versions = ()
        record.move(State.ARRIVING)
        self.arriving_bytes += record.nbytes

    def _take(self, record: Record) -> None:
        """The arrival is the compute stream's from now on."""
        assert record.arrived is not None and record.buffer is not None
        self.backend.wait(record.stream, record.arrived[1])
        record.tensors, record.buffer = record.arrival(), None
        record.move(State.HERE)
        self.arriving_bytes -= record.nbytes
        self._give_span(record)

    def _on_stream(self, record: Record, stream: Stream) -> tuple[torch.Tensor, ...]:
        """The tensors, for work of that stream: copies in its own memory where it is not the put's."""
        backend = self.backend
        backend.follow(stream, record.stream)
        parts, nbytes = laid_out(record.tensors)
        buffer = backend.empty(nbytes, stream)
        backend.run(stream, LayOut(parts, 0), buffer, *record.tensors)
        backend.follow(record.stream, stream)
        return tuple([part.over(buffer) for part in parts])

    def _locked(self) -> AbstractContextManager[Any]:
        """Under the lock, and with the backend's device as this thread's current one: handles of streams mean that."""
        index = self._index
        if index is None or index == current_device():
            return self._lock
        both = ExitStack()
        both.enter_context(torch.cuda.device(index))
        both.enter_context(self._lock)
        return both


class _Outgoing:
    """A source that is kept alive until its copy is done."""

    __slots__ = ("record", "sent", "tensors")

    def __init__(self, record: Record, tensors: tuple[torch.Tensor, ...], sent: Event) -> None:
        self.record, self.tensors, self.sent = record, tensors, sent


def _shut() -> OffloadError:
    return OffloadError("offload: the offloader must be open, but it is closed; make a new one")


def _dense(t: torch.Tensor) -> torch.Tensor:
    """t without its graph, as one block of memory."""
    t = t.detach()
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    return t if is_dense(t) else t.clone(memory_format=torch.preserve_format)


def _close(backend: Backend, arena: PinnedArena) -> None:
    backend.synchronize()
    arena.close()
