"""Sparse encodings on the host in the bytes that they need, though only the device knows how many that is.

cDMA compresses on the way to the link. Here an encode leaves its scratch of worst-case size on the device, and the copy
stream packs it straight into a *lane*, a long span of the arena, from a cursor on that lies on the device
(:mod:`gistkit.kernels.sparse.lane`): what crosses the link is what is stored. The host sees to it that the worst case
has room behind all that is in flight. It reads where each encoding lies, and how much is stored, when it sees the
copy's event done; with that the copy engine fetches exactly these bytes. Where an encoding is wanted before, a kernel
that reads the place on the device fetches it into arrays of worst-case size.

A lane is a stack: its cursor goes back over what has ended at its top. Where encodings end in another order a second
lane is begun, and the first one is empty in the meantime.
"""

from __future__ import annotations

from functools import partial

import torch

from gistkit.codecs import CODECS, Encoded, Sparse
from gistkit.kernels import ops, packed_bytes
from gistkit.runtime.offload.arena import Part, PinnedArena, Span
from gistkit.runtime.offload.backends import Backend, Event, copy

PLACE_BYTES = 16


class Lane:
    """A span, its cursor on the device (int64[1], bytes), and what lies below that, in order."""

    def __init__(self, backend: Backend, span: Span) -> None:
        self._backend, self.memory = backend, span.memory()
        self.cursor = backend.empty(8, backend.d2h).view(torch.int64)
        self.shipments: list[Shipment] = []
        backend.run(backend.d2h, torch.Tensor.zero_, self.cursor)

    def has_room(self, worst_bytes: int) -> bool:
        """Whether so many bytes fit behind all that is or will be there; the cursor goes back over what has ended."""
        ended = None
        while self.shipments and self.shipments[-1].ended:
            ended = self.shipments.pop()
        if ended is not None:
            self._backend.run(self._backend.d2h, _set_cursor, self.cursor, ended.place)
        below = 0
        for shipment in reversed(self.shipments):
            below += shipment.run_bytes
            if shipment.known():
                below += shipment.start
                break
        return below + worst_bytes <= self.memory.numel()


class Lanes:
    """The lanes of one arena. ``nbytes``: the length of one, unless an encoding may need more."""

    def __init__(self, backend: Backend, arena: PinnedArena, nbytes: int) -> None:
        self._backend, self._arena, self._nbytes = backend, arena, nbytes
        self._lanes: list[Lane] = []

    def shipment(self, encoded: Encoded) -> Shipment | None:
        """How an encoding goes to the host in a lane; None for one that is of known size, or is packed in another way
        than item by item. Raises HostMemoryError where there is no room for another lane."""
        _, pending, spill = encoded.state()
        form = CODECS[encoded.codec]
        if not (pending and spill is None and isinstance(form, Sparse) and form.packs_within):
            return None
        _, _, values, _ = encoded.payload
        worst_bytes = packed_bytes(values.numel(), values.element_size(), _has_columns(encoded))
        lane = next((lane for lane in self._lanes if lane.has_room(worst_bytes)), None)
        if lane is None:
            lane = Lane(self._backend, self._arena.take(max(self._nbytes, worst_bytes)))
            self._lanes.append(lane)
        return Shipment(self._backend, lane, encoded, form.slot)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that the lanes take."""
        return sum(lane.memory.numel() for lane in self._lanes)

    def clear(self) -> None:
        """Let go of the lanes; no copy may be left."""
        self._lanes = []


class Shipment:
    """One encoding in a lane. ``place``: int64[2] on the device, where it begins and how many items are stored;
    ``start`` and ``total`` are the same numbers once the host has them. ``ended``: nobody fetches it any more."""

    def __init__(self, backend: Backend, lane: Lane, encoded: Encoded, stride: int) -> None:
        self._backend, self._memory, self._stride = backend, lane.memory, stride
        values = encoded.payload[2]
        self._dtype, self._most, self._columns = values.dtype, values.numel(), _has_columns(encoded)
        self.place = backend.empty(PLACE_BYTES, backend.d2h).view(torch.int64)
        self._there: torch.Tensor | None = None
        self._sent: Event | None = None
        self.start, self.total, self.ended, self._fetched = 0, None, False, 0
        self._lane: Lane | None = lane  # until it is one of the lane's, so that there is no cycle

    @property
    def run_bytes(self) -> int:
        """Bytes of the lane that it takes: what is stored, in the worst case where the host does not know."""
        return packed_bytes(self._items, self._dtype.itemsize, self._columns)

    @property
    def _items(self) -> int:
        return self._most if self.total is None else self.total

    def rest(self, payload: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """What goes to the host as it is: mask words, counts, and the place last."""
        return (*(payload[1:2] if self._columns else payload[:2]), self.place)

    def ship(self, payload: tuple[torch.Tensor, ...]) -> None:
        """Enqueue the packing, which makes the place known to the device."""
        index, counts, values, _ = payload
        lane, columns = self._lane, (index,) if self._columns else ()
        assert lane is not None
        self._backend.run(
            self._backend.d2h,
            partial(_ship, self._stride),
            values,
            counts,
            lane.memory,
            lane.cursor,
            self.place,
            *columns,
        )
        lane.shipments.append(self)
        self._lane = None

    def sent(self, place: torch.Tensor, event: Event) -> None:
        """After that event the host finds the place in ``place``, memory of its own."""
        self._there, self._sent = place, event

    def known(self) -> bool:
        """Whether the host knows by now how much is stored, and where. Once it has ended it cannot learn that any more:
        others may have written where the place was."""
        if self.total is None and not self.ended and self._there is not None and self._backend.done(self._sent):
            self.start, self.total = self._there.tolist()
        return self.total is not None

    def fetch(self, memory: torch.Tensor) -> None:
        """Enqueue the way back of the items to ``run_bytes`` of the device's memory."""
        h2d, lane = self._backend.h2d, self._memory
        self._fetched = self._items
        if self.total is not None:
            self._backend.run(h2d, copy, memory, lane[self.start : self.start + self.run_bytes])
        else:
            assert self._there is not None
            self._backend.run(h2d, _unship, lane, self._there, *self._over(memory))

    def there(self, rest: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The payload in the host's own memory, its items packed, once they are there."""
        assert self.known()
        self._fetched = self._items
        return self.payload(rest, self._memory[self.start : self.start + self.run_bytes])

    def payload(self, rest: tuple[torch.Tensor, ...], memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The payload that has arrived, its items packed; what lies behind the last of them is undefined."""
        values, *columns = self._over(memory)
        index, counts = (columns[0], rest[0]) if columns else rest[:2]
        return index, counts, values, memory[:0]

    def _over(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values, and csr's columns behind them, in a run's memory."""
        n = self._fetched
        values = Part(0, torch.Size((n,)), (1,), self._dtype).over(memory)
        if not self._columns:
            return (values,)
        start = packed_bytes(n, self._dtype.itemsize, False)
        return values, Part(start, torch.Size((n,)), (1,), torch.uint8).over(memory)


def _has_columns(encoded: Encoded) -> bool:
    return encoded.codec.startswith("csr")


def _set_cursor(cursor: torch.Tensor, place: torch.Tensor) -> None:
    cursor.copy_(place[:1])


def _ship(stride: int, values, counts, lane, cursor, place, columns=None) -> None:
    ops.ship(values, columns, counts, stride, lane, cursor, place)


def _unship(lane, place, values, columns=None) -> None:
    ops.unship(lane, place, values, columns)
