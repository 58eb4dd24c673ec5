"""Sparse encodings on the host in the bytes that they need, though only the device knows how many that is (cDMA
compresses on the way to the link): the copy stream packs a scratch straight into a *lane*, a long span of the arena
(docs/runtime.md, "The offloader"; :mod:`gistkit.kernels.sparse.lane`).

A lane is a stack, of bytes and of cells: the encoding of number i begins where cell i of the device says, and its
packing writes into cell i + 1 where the next one may begin. What has ended at the top is popped, and another one begins
where it did. Where encodings end in another order a second lane is begun, and the first one is empty in the meantime.
"""

from __future__ import annotations

from ctypes import c_int64
from functools import lru_cache

import torch

from gistkit.codecs import CODECS, Sparse
from gistkit.kernels import bits_of, known_bytes, ops, packed_bytes
from gistkit.kernels.launch import direct
from gistkit.runtime.offload.arena import PinnedArena, Span
from gistkit.runtime.offload.backends import Backend, CudaBackend, Direct, Event
from gistkit.runtime.offload.parts import PART_ALIGNMENT_BYTES, Bytes

CELL_BYTES = 16
MOST_CELLS, AT_ONCE = 4096, 32


class Lane:
    """A span, and what lies in it, in order. In the cells at its end each packing says where it has begun and how many
    items it has packed: ``told``, two numbers each, which the host reads 30 times as fast as a tensor."""

    def __init__(self, backend: Backend, span: Span) -> None:
        self.span, self.memory = span, span.memory()
        n = lane_cells(span.stop - span.start)
        self.nbytes = self.memory.numel() - n * CELL_BYTES
        self.told = (c_int64 * (2 * n)).from_address(self.memory.data_ptr() + self.nbytes)
        self._places = self.memory[self.nbytes :].view(torch.int64).view(-1, 2)
        self._begins = backend.empty((n + 1) * CELL_BYTES, backend.d2h).view(torch.int64).view(-1, 2)
        self._cells: list[tuple[torch.Tensor, ...]] = []
        self._most = n
        self.shipments: list[Shipment] = []
        backend.run(backend.d2h, torch.Tensor.zero_, self._begins[0])

    def cells(self, number: int) -> tuple[torch.Tensor, ...]:
        """begin, after and place of the encoding of that number, int64[2] each; seen when they are first asked for."""
        while number >= len(self._cells):
            n = len(self._cells)
            begins, places = self._begins[n : n + AT_ONCE + 1].unbind(0), self._places[n : n + AT_ONCE].unbind(0)
            self._cells.extend(zip(begins, begins[1:], places, strict=False))
        return self._cells[number]

    def has_room(self, worst_bytes: int) -> bool:
        """Whether so many bytes fit behind all that is or will be there, what has ended at the top left out."""
        shipments = self.shipments
        while shipments and shipments[-1].ended:
            shipments.pop()
        if not shipments:
            return worst_bytes <= self.nbytes
        if shipments[-1].stop + worst_bytes > self.nbytes:
            below = 0
            for shipment in reversed(shipments):
                known = shipment.known()  # which makes it as small as what is stored
                below += shipment.nbytes
                if known:
                    below += shipment.start
                    break
            shipments[-1].stop = below
        return shipments[-1].stop + worst_bytes <= self.nbytes and len(shipments) < self._most


def lane_cells(nbytes: int) -> int:
    """Encodings in a lane of so many bytes: one to a page, and some."""
    return min(nbytes // 4096 + 8, MOST_CELLS)


class Lanes:
    """The lanes of one arena. ``nbytes``: the length of one, unless an encoding may need more."""

    def __init__(self, backend: Backend, arena: PinnedArena, nbytes: int) -> None:
        self._backend, self._arena, self._nbytes = backend, arena, nbytes
        self._lanes: list[Lane] = []

    def shipment(self, codec: str, payload: tuple[torch.Tensor, ...]) -> Shipment | None:
        """How a scratch of a codec goes to the host in a lane; None for one that is packed in another way than item by
        item. Raises HostMemoryError where there is no room for another lane."""
        values = payload[2]
        kind = _kind(codec, values.dtype, values.numel())
        if kind is None:
            return None
        worst_bytes = kind.worst_bytes
        for lane in self._lanes:
            if lane.has_room(worst_bytes):
                break
        else:
            # cells of twice as much, as they and the rounded span want some more
            span = self._arena.take(max(self._nbytes, worst_bytes + lane_cells(2 * worst_bytes) * CELL_BYTES))
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


class Kind(Direct):
    """Encodings of one codec whose scratch has so many items of a dtype. Called with (values, index, counts, lane,
    begin, after, place) it is ``gistkit::ship``."""

    def __init__(self, codec: str, stride: int, dtype: torch.dtype, most: int) -> None:
        self.columns, self.dtype, self.most, self._stride = codec.startswith("csr"), dtype, most, stride
        self._slots = most // stride
        self.known_bytes = known_bytes(self._slots, stride)
        self.worst_bytes = self.nbytes(most)
        rest_bytes = (most if self.columns else most // 8) + 2 * self._slots
        self.source_bytes = -(-rest_bytes // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES + most * dtype.itemsize
        self._ships: dict[int, direct.Ships] = {}

    def nbytes(self, items: int) -> int:
        """Bytes of a lane, and of an arrival, with so many items."""
        return self.known_bytes + packed_bytes(items, self.dtype.itemsize, self.columns)

    def payload(self, memory: torch.Tensor, items: int) -> tuple[torch.Tensor, ...]:
        """The payload in an arrival's memory. No views, so that each has a version of its own."""
        item, counts_bytes, known = self.dtype.itemsize, 2 * self._slots, self.known_bytes
        values_bytes, run_bytes = items * item, packed_bytes(items, item, False)
        if self.columns:
            sizes = counts_bytes, known - counts_bytes, values_bytes, run_bytes - values_bytes, items
            left = memory.numel() - known - run_bytes - items
            counts, _, values, _, index, _, none = torch.unsafe_split_with_sizes(memory, (*sizes, left, 0))
        else:
            words_bytes = self.most // 8
            sizes = words_bytes, counts_bytes, known - words_bytes - counts_bytes, values_bytes
            left = memory.numel() - known - values_bytes
            words, counts, _, values, _, none = torch.unsafe_split_with_sizes(memory, (*sizes, left, 0))
            index = words.view(torch.int32)
        return index, counts.view(torch.int16), values.view(self.dtype), none

    def __call__(self, values, index, counts, lane, begin, after, place) -> None:
        ops.ship(values, index, counts, self._stride, lane, begin, after, place)

    def enqueue(self, backend: CudaBackend, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        values = tensors[0]
        index = values.get_device()
        ships = self._ships.get(index)
        if ships is None:
            bits = bits_of(values).dtype
            ships = self._ships[index] = direct.ships(self._slots, self._stride, bits, self.columns, index)
        ships(stream, backend.work(ships.work_bytes), *tensors)


@lru_cache(maxsize=4096)
def _kind(codec: str, dtype: torch.dtype, most: int) -> Kind | None:
    form = CODECS[codec]
    return Kind(codec, form.slot, dtype, most) if isinstance(form, Sparse) and form.packs_within else None


class Shipment:
    """One encoding in a lane. ``start`` and ``total``: where it begins and how many items are stored, once the host
    knows, after the event ``sent``; ``nbytes`` of the lane that it takes, in the worst case before. ``stop``: at most
    where it ends. ``ended``: nobody fetches it any more."""

    __slots__ = (
        "_backend", "_fetched", "_lane", "_memory", "_number", "_place", "_told", "ended", "kind", "nbytes", "sent",
        "start", "stop", "total",
    )  # fmt: skip

    def __init__(self, backend: Backend, lane: Lane, kind: Kind) -> None:
        self._backend, self._memory, self._told, self.kind = backend, lane.memory, lane.told, kind
        self._lane: Lane | None = lane  # until it is one of the lane's, so that there is no cycle
        self._place: torch.Tensor | None = None
        self.sent: Event | None = None
        self.start, self.stop, self.ended, self.nbytes = 0, 0, False, kind.worst_bytes
        self._number = self._fetched = 0
        self.total: int | None = None

    def ship(self, payload: tuple[torch.Tensor, ...]) -> None:
        """Enqueue the packing."""
        index, counts, values, _ = payload
        lane, backend = self._lane, self._backend
        assert lane is not None
        shipments = lane.shipments
        number = self._number = len(shipments)
        begin, after, place = lane.cells(number)
        backend.run(backend.d2h, self.kind, values, index, counts, lane.memory, begin, after, place)
        self.stop = self.nbytes + (shipments[-1].stop if shipments else 0)
        shipments.append(self)
        self._place, self._lane = place, None

    def known(self) -> bool:
        """Whether the host knows by now how much is stored, and where. Once it has ended it cannot learn that any more:
        another one's place may be where its own was."""
        if self.total is None and not self.ended and self._place is not None and self._backend.done(self.sent):
            first = 2 * self._number
            self.start, items = self._told[first : first + 2]
            self.total, self.nbytes = items, self.kind.nbytes(items)
            self._place = self.sent = None
        return self.total is not None

    def fetch(self, buffer: torch.Tensor) -> None:
        """Enqueue the way back to ``nbytes`` of the device's memory."""
        backend = self._backend
        if self.total is None:
            assert self._place is not None
            self._fetched = self.kind.most
            index, _, values, _ = self.kind.payload(buffer, self._fetched)
            columns = (index,) if self.kind.columns else ()
            known = buffer[: self.kind.known_bytes]
            backend.run(backend.h2d, _unship, self._memory, self._place, known, values, *columns)
        else:
            self._fetched = self.total
            backend.run(backend.h2d, Bytes(self.start, self.nbytes), buffer, self._memory)

    def payload(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The payload that has arrived; beyond its items undefined."""
        return self.kind.payload(memory, self._fetched)


def _unship(lane, place, known, values, columns=None) -> None:
    ops.unship(lane, place, known, values, columns)
