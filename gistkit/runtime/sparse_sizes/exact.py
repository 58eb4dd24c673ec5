"""Sparse encodings of the size that they need, though the host learns that size late, or never has to.

On CUDA a sparse codec leaves a scratch of worst-case size and, on the device, the number of elements stored. Asking for
that number would drain the device. There are two ways past it, both on the stream of the encode.

*Within a forecast*, wherever the share of non-zeros is known from an earlier step: the scratch is packed at once into
arrays of the forecast size, what does not fit into a spill (:mod:`gistkit.runtime.sparse_sizes.spill`), and let go of
before anything else runs. The count travels behind it, and is asked about whenever something is encoded: it gives the
spill back, and the next step its forecast. Nobody waits, and one scratch lives at a time however far the host is ahead.

*Delayed*, where nothing is known (a first step), a format's packed size depends on the count (fp10, scaled formats), or
the host has no memory for a spill: the count is copied to pinned memory behind the encode, and a later call that finds
it arrived allocates the exact arrays, packs into them and drops the scratch. Encoding asks about encodings that are
``lag`` back, as the event of a younger one can hardly be done; :meth:`ExactPacker.poll` asks about all. What is not
settled holds its scratch, as large as a dense copy and its metadata, so the memory saved depends on how far the host
runs ahead of the device. ``bounded`` fixes that: before another scratch is made the host waits, where need be, for the
one of ``lag`` encodings back, which leaves the device what was launched since, and at most ``lag`` of them live.

Under a plan that promises a budget an encoding brings its own way of settling (``settle``): packed, what is denser than
planned may be larger than there is room for (:mod:`gistkit.runtime.program.density_excess`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from gistkit.codecs import Codec, Encoded, Sparse, codec
from gistkit.kernels import bits_of, flat
from gistkit.runtime.sparse_sizes.counts import Known, PinnedCounts, Stream, Ticket, is_current, stream_of
from gistkit.runtime.sparse_sizes.forecast import Forecast
from gistkit.runtime.sparse_sizes.pending import Settle, Waiting, Within
from gistkit.runtime.sparse_sizes.spill import NO_MEMORY, Spill

PLANNED = "as planned"
FIRST = "no step has told how many elements they store"
BY_COUNT = "how codes of {} are packed depends on their number"


class Fit(NamedTuple):
    """How a tensor is encoded by its forecast: in arrays of ``capacity`` items, or delayed (0), and ``why`` so."""

    capacity: int
    why: str


class ExactPacker:
    """Encodes tensors and settles sparse encodings when their counts arrive; safe to use from several threads.

    ``lag``: after how many later encodings a delayed one is first asked about (1 or more). ``bounded``: wait for it
    then. ``spill``: where the host's memory comes from for encodings within a forecast; without it there are none.
    ``transport`` makes the way that the counts of one stream take; without it CUDA counts go through pinned memory and
    CPU tensors are packed at once. Raises ValueError for a lag below 1.
    """

    def __init__(
        self,
        lag: int = 2,
        bounded: bool = False,
        transport: Callable[[], PinnedCounts] | None = None,
        spill: Spill | None = None,
    ) -> None:
        if lag < 1:
            raise ValueError(f"ExactPacker: lag must be at least 1 encoding, got {lag}; 2 is the default")
        self._lag, self._bounded = lag, bounded
        self._transport, self._spill = transport, spill
        self._transports: dict[Stream, PinnedCounts] = {}
        self._waiting: list[Waiting] = []
        self._within: deque[Within] = deque()
        self._lock = threading.Lock()
        self._sent = 0
        self.waits: Counter[str] = Counter()
        """How often the host has waited for a count, by the reason why the encoding was delayed."""

    @property
    def waiting(self) -> int:
        """How many encodings still hold a scratch, those not counted that nobody wants any more."""
        return sum(item.encoded() is not None for item in self._waiting)

    def at_once(self, x: torch.Tensor) -> bool:
        """Whether the host learns x's sizes without a delay."""
        return self._transport is None and not x.is_cuda

    def fit(self, form: Codec, x: torch.Tensor, forecast: Forecast | None) -> Fit:
        """How x is encoded by a codec. The first question about a device waits for it (:meth:`Spill.unusable`)."""
        if forecast is None or not isinstance(form, Sparse) or self.at_once(x) or not x.numel() or self._spill is None:
            return Fit(0, PLANNED)
        why = self._spill.unusable(form, x) if form.packs_within else BY_COUNT.format(form.name)
        if why or forecast.share is None:
            return Fit(0, why or FIRST)
        return Fit(forecast.capacity(form, x.numel()), "")

    def encode(
        self,
        form: Codec | str,
        x: torch.Tensor,
        settle: weakref.WeakMethod[Settle] | None = None,
        forecast: Forecast | None = None,
        fit: Fit | None = None,
    ) -> Encoded:
        """The encoding of x by a codec or the codec of that name, pending where its size is not known yet.

        First settles what is due, so that a new scratch can take the place of an old one. Waits for the device only if
        ``bounded``, and not for what is encoded within a ``forecast``, which is told the share of elements stored when
        the count has arrived. ``settle`` is called in place of :meth:`Sparse.settle`, in whatever thread encodes then,
        and the forecast, where there is one, only told. ``fit``: what :meth:`fit` has said of this x. Raises what
        :func:`gistkit.codecs.codec` and :meth:`Codec.encode` raise.
        """
        chosen = codec(form) if isinstance(form, str) else form
        if not isinstance(chosen, Sparse) or self.at_once(x):
            return chosen.encode(x)
        capacity, why = fit or self.fit(chosen, x, forecast if settle is None else None)
        with self._lock:
            self._hear()
            if capacity and forecast is not None:
                encoded = self._packed_within(chosen, x, forecast, capacity)
                if encoded is not None:
                    return encoded
                why = NO_MEMORY
            self._next(self._bounded)
            encoded = chosen.begin(x)
            if encoded.pending:
                stream = stream_of(x)
                ticket = self._way(stream).send(chosen.total(encoded))
                way = chosen.settle if settle is None else settle
                item = (way, ticket, stream, self._sent, forecast, why, encoded.numel)
                self._waiting.append(Waiting(weakref.ref(encoded), *item))
        return encoded

    def _packed_within(self, chosen: Sparse, x: torch.Tensor, forecast: Forecast, capacity: int) -> Encoded | None:
        """The encoding of x in arrays as large as forecast; None where the host has no memory for what may be more."""
        assert self._spill is not None
        n, dtype = x.numel(), x.dtype
        memory = self._spill.take(chosen.spill_bytes(n, dtype, capacity), x)
        if memory is None:
            return None
        self._next(False)
        ticket = self._way(stream_of(x)).open(x.device)
        encoded = chosen.begin_within(x, capacity, memory, ticket.slot)
        ticket.sent()
        self._within.append(Within(weakref.ref(encoded), chosen, ticket, forecast, capacity, n, dtype))
        return encoded

    def encode_and_wait(self, form: Codec, x: torch.Tensor) -> Encoded:
        """The encoding of x in its exact size, for which the device is waited for. It counts as one of the ``lag``
        later encodings."""
        if not isinstance(form, Sparse) or self.at_once(x):
            return form.encode(x)
        with self._lock:
            self._next(self._bounded)
        encoded = form.begin(x)
        form.settle(encoded, int(form.total(encoded)))
        return encoded

    def _next(self, wait: bool) -> None:
        """Count an encoding that begins now, and settle what it makes due."""
        self._sent += 1
        newest = self._sent - self._lag
        self._settle(lambda item: item.number <= newest, wait)

    def count(self, x: torch.Tensor) -> Ticket:
        """The number of elements of a dense x whose bit pattern is not zero, on its way to the host; never waits."""
        total = torch.count_nonzero(bits_of(flat(x)))
        if self.at_once(x):
            return Known(int(total))
        with self._lock:
            return self._way(stream_of(x)).send(total)

    def poll(self) -> int:
        """Settle every delayed encoding of the current stream and every one within a forecast whose count has arrived,
        whatever its age; how many there were. Never waits for the device."""
        if not self._waiting and not self._within:
            return 0
        with self._lock:
            return self._hear_all() + self._settle(lambda _: True, wait=False)

    def hear(self) -> None:
        """Take in the counts of encodings within a forecast that have arrived: before a forward, so that it goes by the
        last one's. Never waits for the device."""
        if self._within:
            with self._lock:
                self._hear()

    def settle_first(self) -> None:
        """Settle the delayed encodings of the current stream of whose storages nothing was known, and wait for their
        counts: then there is a forecast for the next step."""
        with self._lock:
            self._settle(lambda item: item.why == FIRST, wait=True)

    def listen(self) -> None:
        """Note in every encoding whose count has arrived how many elements it stores, and pack none: packing takes
        memory beside the scratch. Never waits for the device."""
        with self._lock:
            self._hear_all()
            for item in self._waiting:
                encoded, total = item.encoded(), item.ticket.ready()
                if total is not None:
                    item.tell(total)
                    if encoded is not None:
                        encoded.nonzeros = total

    def _way(self, stream: Stream) -> PinnedCounts:
        if stream not in self._transports:
            self._transports[stream] = (self._transport or PinnedCounts)()
        return self._transports[stream]

    def _hear(self) -> None:
        """Take in the counts of encodings within a forecast, oldest first, as far as they have arrived."""
        while self._within:
            total = self._within[0].ticket.ready()
            if total is None:
                return
            self._within[0].arrived(total)
            self._within.popleft()

    def _hear_all(self) -> int:
        """The same, whatever their order; how many of the encodings are still wanted."""
        totals = [(item, item.ticket.ready()) for item in self._within]
        wanted = sum(item.arrived(total) for item, total in totals if total is not None)
        self._within = deque(item for item, total in totals if total is None)
        return wanted

    def _settle(self, is_due: Callable[[Waiting], bool], wait: bool) -> int:
        """Settle delayed encodings that are due. Should one fail, the list still holds it and the next call retries."""
        left: list[Waiting] = []
        settled = 0
        for item in self._waiting:
            encoded = item.encoded()
            if encoded is None:
                # nobody wants it any more, but its count may still be of use
                late = None if item.forecast is None else item.ticket.ready()
                if late is not None:
                    item.tell(late)
                elif item.forecast is not None:
                    left.append(item)
                continue
            due = is_due(item) and is_current(item.stream)
            total = item.ticket.ready() if due else None
            if total is None and due and wait:
                self.waits[item.why] += 1
                total = item.ticket.wait()
            if total is None:
                left.append(item)
            else:
                item.settled(encoded, total)
                item.tell(total)
                settled += 1
        self._waiting = left
        return settled
