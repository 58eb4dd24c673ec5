"""Exact packing, delayed: sparse encodings shrink to their size once the host has learnt it, and nobody waits.

On CUDA a sparse codec leaves a scratch of worst-case size and, on the device, the number of elements stored. Asking
for that number would drain the device. Instead it is copied to pinned memory behind the encode, an event is recorded
behind the copy, and a later call that finds the event done allocates the exact arrays, packs into them and drops the
scratch. All of it runs on the stream of the encode: the memory that the scratch gives back is reused in stream order,
so no other stream has to be told of it.

Encoding asks about encodings that are ``lag`` back, as the event of a younger one can hardly be done;
:meth:`ExactPacker.poll` asks about all. What is not settled holds its scratch, as large as a dense copy and its
metadata, so the memory saved depends on how far the host runs ahead of the device. ``bounded`` fixes that: the host
waits, where need be, for the encode of ``lag`` encodings back, which leaves the device what was launched since, and
at most ``lag`` scratches live.

Under a plan that promises a budget an encoding brings its own way of settling (``settle``): packed, what is denser than
planned may be larger than there is room for (:mod:`gistkit.runtime.denser`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gistkit.codecs import Codec, Encoded, Sparse, codec
from gistkit.kernels.layout import flat
from gistkit.kernels.sparse_args import bits_of

PINNED_SLOTS = 64
Settle = Callable[[Encoded, int], None]
"""What becomes of a pending encoding when its count is known."""


class Ticket(Protocol):
    """One count on its way to the host."""

    def ready(self) -> int | None:
        """The count, or None while it has not arrived. Does not wait."""
        ...

    def wait(self) -> int:
        """The count, after waiting for it."""
        ...


class _Known:
    """A count that the host has."""

    def __init__(self, value: int) -> None:
        self._value = value

    def ready(self) -> int:
        return self._value

    def wait(self) -> int:
        return self._value


class CountTransport(Protocol):
    """A way for counts from the device to the host."""

    def send(self, total: torch.Tensor) -> Ticket:
        """Start the transfer of a 0-d int64 tensor behind the work that the current stream holds. Does not wait."""
        ...


class PinnedCounts:
    """Counts of one CUDA stream through pinned int64 slots, with an event each.

    A slot whose ticket was dropped early is free at once: what the stream writes there for the next owner comes after
    what it still has to write for the last one, and the next owner's event after both.
    """

    def __init__(self) -> None:
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def send(self, total: torch.Tensor) -> Ticket:
        if not self._free:
            slots = torch.empty(PINNED_SLOTS, dtype=torch.int64, pin_memory=True)
            self._free.extend((slot, torch.cuda.Event()) for slot in slots.unbind())
        slot, event = self._free.pop()
        slot.copy_(total, non_blocking=True)
        event.record(torch.cuda.current_stream(total.device))
        return _PinnedTicket(self._free, slot, event, total)


class _PinnedTicket:
    def __init__(
        self,
        free: list[tuple[torch.Tensor, torch.cuda.Event]],
        slot: torch.Tensor,
        event: torch.cuda.Event,
        total: torch.Tensor,
    ) -> None:
        self._free, self._slot, self._event = free, slot, event
        self._source = total  # alive until the copy is done

    def ready(self) -> int | None:
        return int(self._slot) if self._event.query() else None

    def wait(self) -> int:
        self._event.synchronize()
        return int(self._slot)

    def __del__(self) -> None:
        self._free.append((self._slot, self._event))


@dataclass(frozen=True)
class _Waiting:
    """An encoding that waits for its count: weakly held, so that one that is no longer wanted goes with its scratch."""

    encoded: weakref.ref[Encoded]
    settle: Settle | weakref.WeakMethod[Settle]
    ticket: Ticket
    stream: torch.cuda.Stream | None
    number: int

    def settled(self, encoded: Encoded, total: int) -> None:
        """Give the encoding its final form."""
        settle = self.settle() if isinstance(self.settle, weakref.WeakMethod) else self.settle
        if settle is not None:
            settle(encoded, total)


def _is_current(stream: torch.cuda.Stream | None) -> bool:
    """Settling elsewhere would free the scratch under a stream that its allocator does not know of."""
    return stream is None or torch.cuda.current_stream(stream.device) == stream


def _stream_of(x: torch.Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


class ExactPacker:
    """Encodes tensors and settles sparse encodings when their counts arrive; safe to use from several threads.

    ``lag``: after how many later encodings an encoding is first asked about (1 or more). ``bounded``: wait for it then.
    ``transport`` makes the way that the counts of one stream take; without it CUDA counts go through pinned memory and
    CPU tensors are packed at once. Raises ValueError for a lag below 1.
    """

    def __init__(
        self, lag: int = 2, bounded: bool = False, transport: Callable[[], CountTransport] | None = None
    ) -> None:
        if lag < 1:
            raise ValueError(f"ExactPacker: lag must be at least 1 encoding, got {lag}; 2 is the default")
        self._lag, self._bounded = lag, bounded
        self._transport = transport
        self._transports: dict[torch.cuda.Stream | None, CountTransport] = {}
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()
        self._sent = 0

    @property
    def waiting(self) -> int:
        """How many encodings still hold a scratch, those not counted that nobody wants any more."""
        return sum(item.encoded() is not None for item in self._waiting)

    def at_once(self, x: torch.Tensor) -> bool:
        """Whether the host learns x's sizes without a delay."""
        return self._transport is None and not x.is_cuda

    def encode(self, form: Codec | str, x: torch.Tensor, settle: weakref.WeakMethod[Settle] | None = None) -> Encoded:
        """The encoding of x by a codec or the codec of that name, pending where its size is not known yet.

        First settles what is due, so that the new scratch can take the place of an old one. Waits for the device only
        if ``bounded``. ``settle`` is called in place of :meth:`Sparse.settle`, in whatever thread encodes then. Raises
        what :func:`gistkit.codecs.codec` and :meth:`Codec.encode` raise.
        """
        chosen = codec(form) if isinstance(form, str) else form
        if not isinstance(chosen, Sparse) or self.at_once(x):
            return chosen.encode(x)
        with self._lock:
            self._next()
            encoded = chosen.begin(x)
            if encoded.pending:
                stream = _stream_of(x)
                ticket = self._way(stream).send(chosen.total(encoded))
                way = chosen.settle if settle is None else settle
                self._waiting.append(_Waiting(weakref.ref(encoded), way, ticket, stream, self._sent))
        return encoded

    def encode_and_wait(self, chosen: Sparse, x: torch.Tensor) -> tuple[Encoded, int]:
        """(encoding, how many elements it stores): pending still, though the device has been waited for. It counts as
        one of the ``lag`` later encodings."""
        with self._lock:
            self._next()
        encoded = chosen.begin(x)
        return encoded, int(chosen.total(encoded))

    def _next(self) -> None:
        """Count an encoding that begins now, and settle what it makes due."""
        self._sent += 1
        self._settle(self._sent - self._lag, self._bounded)

    def count(self, x: torch.Tensor) -> Ticket:
        """The number of elements of a dense x whose bit pattern is not zero, on its way to the host; never waits."""
        total = torch.count_nonzero(bits_of(flat(x)))
        if self.at_once(x):
            return _Known(int(total))
        with self._lock:
            return self._way(_stream_of(x)).send(total)

    def poll(self) -> int:
        """Settle every encoding of the current stream whose count has arrived, whatever its age; how many there were.
        Never waits for the device."""
        if not self._waiting:
            return 0
        with self._lock:
            return self._settle(self._sent, wait=False)

    def listen(self) -> None:
        """Note in every encoding whose count has arrived how many elements it stores, and settle none: packing takes
        memory beside the scratch. Never waits for the device."""
        with self._lock:
            for item in self._waiting:
                encoded, total = item.encoded(), item.ticket.ready()
                if encoded is not None and total is not None:
                    encoded.nonzeros = total

    def _way(self, stream: torch.cuda.Stream | None) -> CountTransport:
        if stream not in self._transports:
            self._transports[stream] = (self._transport or PinnedCounts)()
        return self._transports[stream]

    def _settle(self, newest: int, wait: bool) -> int:
        """Settle encodings up to number ``newest``. Should one fail, the list still holds it and the next call
        retries."""
        left: list[_Waiting] = []
        settled = 0
        for item in self._waiting:
            encoded = item.encoded()
            if encoded is None:
                continue
            due = item.number <= newest and _is_current(item.stream)
            total = (item.ticket.wait() if wait else item.ticket.ready()) if due else None
            if total is None:
                left.append(item)
            else:
                item.settled(encoded, total)
                settled += 1
        self._waiting = left
        return settled
