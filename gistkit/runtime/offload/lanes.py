"""Sparse encodings on the host in the bytes that they need, though only the device knows how many that is (cDMA
compresses on the way to the link): the copy stream packs a scratch straight into a *lane*, a long span of the arena
(docs/runtime.md, "The offloader"; :mod:`gistkit.kernels.sparse.lane`).

A lane is a stack, of bytes and of cells: the encoding of number i begins where cell i of the device says, and its
packing writes into cell i + 1 where the next one may begin. What has ended at the top is popped, and another one begins
where it did. Where encodings end in another order a second lane is begun, and the first one is empty in the meantime.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from gistkit.codecs import CODECS, Encoded, Sparse
from gistkit.kernels import bits_of, ops, packed_bytes
from gistkit.kernels.launch import direct
from gistkit.runtime.offload.arena import PinnedArena, Span
from gistkit.runtime.offload.backends import Backend, CudaBackend, Direct, Event
from gistkit.runtime.offload.parts import Bytes, Part

CELL_BYTES = 16
MOST_CELLS, AT_ONCE = 4096, 32


class Cells:
    """int64[2] each of one memory, seen when they are first asked for."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._all = memory.view(torch.int64).view(-1, 2)
        self._seen: list[torch.Tensor] = []

    def __getitem__(self, i: int) -> torch.Tensor:
        while i >= len(self._seen):
            n = len(self._seen)
            self._seen.extend(self._all[n : n + AT_ONCE].unbind(0))
        return self._seen[i]


class Lane:
    """A span, and what lies in it, in order. ``places``: cells of the host at its end, where each packing says where
    it has begun and how many items it has packed. ``begins``: the device's, one more."""

    def __init__(self, backend: Backend, span: Span) -> None:
        self.span, self.memory = span, span.memory()
        n = lane_cells(span.stop - span.start)
        self.nbytes = self.memory.numel() - n * CELL_BYTES
        self.places = Cells(self.memory[self.nbytes :])
        self._begins = backend.empty((n + 1) * CELL_BYTES, backend.d2h)
        self.begins, self._most = Cells(self._begins), n
        self.shipments: list[Shipment] = []
        backend.run(backend.d2h, torch.Tensor.zero_, self.begins[0])

    def has_room(self, worst_bytes: int) -> bool:
        """Whether so many bytes fit behind all that is or will be there, what has ended at the top left out."""
        shipments = self.shipments
        while shipments and shipments[-1].ended:
            shipments.pop()
        below = 0
        for shipment in reversed(shipments):
            below += shipment.run_bytes
            if shipment.known():
                below += shipment.start
                break
        return below + worst_bytes <= self.nbytes and len(shipments) < self._most


def lane_cells(nbytes: int) -> int:
    """Encodings in a lane of so many bytes: one to a page, and some."""
    return min(nbytes // 4096 + 8, MOST_CELLS)


class Lanes:
    """The lanes of one arena. ``nbytes``: the length of one, unless an encoding may need more."""

    def __init__(self, backend: Backend, arena: PinnedArena, nbytes: int) -> None:
        self._backend, self._arena, self._nbytes = backend, arena, nbytes
        self._lanes: list[Lane] = []

    def shipment(self, encoded: Encoded) -> Shipment | None:
        """How an encoding goes to the host in a lane; None for one that is of known size, or is packed in another way
        than item by item. Raises HostMemoryError where there is no room for another lane."""
        payload, pending, spill = encoded.state()
        if not pending or spill is not None:
            return None
        values = payload[2]
        kind = _kind(encoded.codec, values.dtype, values.numel())
        if kind is None:
            return None
        for lane in self._lanes:
            if lane.has_room(kind.worst_bytes):
                break
        else:
            worst_bytes = kind.worst_bytes
            nbytes = max(self._nbytes, worst_bytes + (lane_cells(worst_bytes) + 2) * CELL_BYTES)
            span = self._arena.take(nbytes)
            try:
                lane = Lane(self._backend, span)
            except BaseException:  # no device memory for where its encodings begin
                span.chunk.give(span.start, span.stop)
                raise
            self._lanes.append(lane)
        return Shipment(self._backend, lane, kind)

    @property
    def nbytes(self) -> int:
        return sum(lane.memory.numel() for lane in self._lanes)

    def clear(self) -> None:
        """Let go of the lanes; no copy may be left."""
        self._lanes = []


class Kind:
    """Encodings of one codec whose scratch has so many items of a dtype."""

    def __init__(self, codec: str, stride: int, dtype: torch.dtype, most: int) -> None:
        self.columns, self.dtype, self.most, self.stride = codec.startswith("csr"), dtype, most, stride
        self.worst_bytes = self.bytes_of(most)
        self._ships: dict[int, direct.Ships] = {}

    def bytes_of(self, items: int) -> int:
        return packed_bytes(items, self.dtype.itemsize, self.columns)

    def rest(self, payload: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What goes to the host as it is, one behind the other: zvc's mask words, and counts."""
        return payload[1:2] if self.columns else payload[:2]

    def ships(self, values: torch.Tensor) -> direct.Ships:
        index = values.get_device()
        found = self._ships.get(index)
        if found is None:
            bits, slots = bits_of(values).dtype, self.most // self.stride
            found = self._ships[index] = direct.ships(slots, self.stride, bits, self.columns, index)
        return found


class Packing(Direct):
    """values, index, counts, lane, begin, after, place, memory: ``gistkit::ship``, the rest at ``offset`` in memory."""

    __slots__ = ("_kind", "_offset")

    def __init__(self, kind: Kind, offset: int) -> None:
        self._kind, self._offset = kind, offset

    def __call__(self, values, index, counts, lane, begin, after, place, memory) -> None:
        rest = memory[self._offset :]
        ops.ship(values, index, counts, self._kind.stride, lane, begin, after, place, rest)

    def enqueue(self, backend: CudaBackend, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        ships = self._kind.ships(tensors[0])
        ships(stream, backend.work(ships.work_bytes), *tensors, rest_start=self._offset)


@lru_cache(maxsize=4096)
def _kind(codec: str, dtype: torch.dtype, most: int) -> Kind | None:
    form = CODECS[codec]
    return Kind(codec, form.slot, dtype, most) if isinstance(form, Sparse) and form.packs_within else None


class Shipment:
    """One encoding in a lane. ``start`` and ``total``: where it begins and how many items are stored, once the host
    knows, after the event ``sent``. ``ended``: nobody fetches it any more."""

    __slots__ = ("_backend", "_fetched", "_lane", "_place", "_span", "ended", "kind", "sent", "start", "total")

    def __init__(self, backend: Backend, lane: Lane, kind: Kind) -> None:
        self._backend, self._span, self.kind = backend, lane.span, kind
        self._lane: Lane | None = lane  # until it is one of the lane's, so that there is no cycle
        self._place: torch.Tensor | None = None
        self.sent: Event | None = None
        self.start, self.ended, self._fetched = 0, False, 0
        self.total: int | None = None

    @property
    def run_bytes(self) -> int:
        """Bytes of the lane that it takes: what is stored, in the worst case where the host does not know."""
        return self.kind.worst_bytes if self.total is None else self.kind.bytes_of(self.total)

    def ship(self, payload: tuple[torch.Tensor, ...], span: Span) -> None:
        """Enqueue the packing, and the way of the rest to the span."""
        index, counts, values, _ = payload
        lane, backend, packing = self._lane, self._backend, Packing(self.kind, span.start)
        assert lane is not None
        number = len(lane.shipments)
        cells = lane.begins[number], lane.begins[number + 1], lane.places[number]
        backend.run(backend.d2h, packing, values, index, counts, lane.memory, *cells, span.chunk.memory)
        self._place = cells[2]
        lane.shipments.append(self)
        self._lane = None

    def known(self) -> bool:
        """Whether the host knows by now how much is stored, and where. Once it has ended it cannot learn that any more:
        another one's place may be where its own was."""
        if self.total is None and not self.ended and self._place is not None and self._backend.done(self.sent):
            self.start, self.total = self._place.tolist()
            self._place = self.sent = None
        return self.total is not None

    def fetch(self, buffer: torch.Tensor, start: int) -> None:
        """Enqueue the way back of the items to ``run_bytes`` of the device's memory, from byte ``start`` on."""
        backend, span = self._backend, self._span
        if self.total is None:
            assert self._place is not None
            self._fetched = self.kind.most
            backend.run(backend.h2d, _unship, span.memory(), self._place, *self._over(buffer, start))
        else:
            self._fetched = self.total
            there = Bytes(start, span.start + self.start, self.run_bytes)
            backend.run(backend.h2d, there, buffer, span.chunk.memory)

    def payload(self, rest: tuple[torch.Tensor, ...], memory: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
        """The payload that has arrived, its items packed from that byte of the memory on; beyond them undefined."""
        values, *columns = self._over(memory, start)
        index, counts = (columns[0], rest[0]) if columns else rest[:2]
        return index, counts, values, memory[:0]

    def _over(self, memory: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
        """Values, and csr's columns behind them, in a run's memory."""
        kind, n = self.kind, self._fetched
        values = Part(start, torch.Size((n,)), (1,), kind.dtype, 0).over(memory)
        if not kind.columns:
            return (values,)
        start += packed_bytes(n, kind.dtype.itemsize, False)
        return values, Part(start, torch.Size((n,)), (1,), torch.uint8, 0).over(memory)


def _unship(lane, place, values, columns=None) -> None:
    ops.unship(lane, place, values, columns)
