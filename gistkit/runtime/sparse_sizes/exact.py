"""Sparse encodings of the size that they need, though the host learns it late, or never: docs/kernels.md, "Codecs".

*Within a forecast* one scratch lives at a time however far the host is ahead. The count is asked about whenever
something is encoded: it gives the spill back, and the next step its forecast. *Delayed*, a later call that finds the
count arrived packs into exact arrays. Encoding asks about encodings that are ``lag`` back, as the event of a younger
one can hardly be done; :meth:`ExactPacker.poll` asks about all. ``bounded``: before another scratch is made the host
waits, where need be, for the one of ``lag`` encodings back, so that at most ``lag`` of them live.

While a CUDA graph is captured no count reaches the host: nothing is encoded in a sparse form and nothing is settled.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gistkit.codecs import Codec, Encoded, Sparse
from gistkit.kernels import bits_of, capturing, flat
from gistkit.runtime.sparse_sizes.counts import PinnedCounts, PinnedTicket, Stream, is_current, stream_of
from gistkit.runtime.sparse_sizes.spill import NO_MEMORY, Spill

MARGIN = 0.02
"""Of share, in points, that a storage may have more non-zeros than in the last step (0.50 becomes 0.52); as shares near
zero move as much as others (docs/log.md). Arrays are 4.3 % larger then than what is in them, and 0.8 % of the encodings
larger than that (CPU); with one point it would be 2.3 % and 3.6 %, with three 6.3 % and 0.1 %."""


class Forecast(NamedTuple):
    """What is expected of one storage (``share``: of elements that are not zero; None: nothing is known).
    ``heard(share)`` is called when the count has reached the host."""

    share: float | None
    heard: Callable[[float], None]


class Forecasts(NamedTuple):
    """One forward's: the ``shares`` by storage, and ``learn``, which takes in those of a step. Counts may arrive when
    forward and backward are long over, so this holds no tensors."""

    shares: Mapping[int, float]
    learn: Callable[[Mapping[int, float]], None]

    def of(self, storage: int) -> Forecast:
        """The forecast of a planned storage."""
        return Forecast(self.shares.get(storage), lambda share: self.learn({storage: share}))


PLANNED = "as planned"
FIRST = "no step has told how many elements they store"
BY_COUNT = "how codes of {} are packed depends on their number"


class Counting(NamedTuple):
    """An encoding whose count is on its way: weakly held, so that one that is no longer wanted goes with its memory. Of
    a tensor that is only counted there is none.
    ``capacity``: of the arrays within a forecast. ``number``: how many encodings began before it. ``why``: why it holds
    a scratch (empty: it was packed within a forecast)."""

    encoded: Callable[[], Encoded | None]
    form: Any
    ticket: PinnedTicket
    elements: int
    forecast: Forecast | None
    stream: Stream = None
    number: int = 0
    why: str = ""
    capacity: int = 0

    def arrived(self, total: int) -> bool:
        """Take the count in; whether anybody still wants the encoding."""
        encoded = self.encoded()
        if encoded is not None:
            self.form.settle(encoded, total)
        self.tell(total)
        return encoded is not None

    def tell(self, total: int) -> None:
        """Say how much was stored."""
        if self.forecast is not None:
            self.forecast.heard(total / self.elements)


class ExactPacker:
    """Encodes tensors and settles sparse encodings when their counts arrive; safe to use from several threads. ``lag``:
    after how many later encodings a delayed one is first asked about (1 or more). ``bounded``: wait for it then.
    ``spill``: host memory for encodings within a forecast, of which there are none without it. ``transport`` makes a
    stream's way for counts; without it CUDA counts go through pinned memory and CPU tensors are packed at once."""

    def __init__(
        self,
        lag: int = 2,
        bounded: bool = False,
        transport: Callable[[], PinnedCounts] | None = None,
        spill: Spill | None = None,
    ) -> None:
        self._lag, self._bounded = lag, bounded
        self._transport, self._spill = transport, spill
        self._transports: defaultdict[Stream, PinnedCounts] = defaultdict(transport or PinnedCounts)
        self._waiting: list[Counting] = []
        self._within: deque[Counting] = deque()
        self._lock = threading.Lock()
        self._sent = 0
        self.waits: Counter[str] = Counter()
        """How often the host has waited for a count, by the reason why the encoding was delayed."""
        self.beyond = 0
        """How many encodings had more elements than their forecasts had room for."""

    def at_once(self, x: torch.Tensor) -> bool:
        """Whether the host learns x's sizes without a delay."""
        return self._transport is None and not x.is_cuda

    def _capacity(self, form: Sparse, x: torch.Tensor, forecast: Forecast | None) -> tuple[int, str]:
        """(items of x's arrays by its forecast, why it has none)."""
        if forecast is None or not x.numel() or self._spill is None:
            return 0, PLANNED
        if forecast.share is None or not form.packs_within:
            return 0, FIRST if form.packs_within else BY_COUNT.format(form.name)
        return form.capacity(x.numel(), min(1.0, forecast.share + MARGIN)), ""

    def encode(
        self, form: Codec, x: torch.Tensor, forecast: Forecast | None = None, most_bytes: float = math.inf
    ) -> Encoded | None:
        """The encoding of x, pending where its size is not known yet; None where it would take more than ``most_bytes``
        by its forecast, and while a CUDA graph is captured. First settles what is due, so that a new scratch can take
        the place of an old one. Waits for the device only if ``bounded``, and not for what is encoded within a
        ``forecast``, which is told the share of elements stored when the count has arrived."""
        if not isinstance(form, Sparse) or self.at_once(x):
            return form.encode(x)
        if capturing():
            return None
        capacity, why = self._capacity(form, x, forecast)
        if capacity and form.within_bytes(x.numel(), x.dtype, capacity) > most_bytes:
            return None
        with self._lock:
            self._hear()
            if capacity:
                encoded = self._packed_within(form, x, forecast, capacity)
                if encoded is not None:
                    return encoded
                why = NO_MEMORY
            self._next(self._bounded)
            encoded = form.begin(x)
            if encoded.pending:
                stream = stream_of(x)
                ticket = self._transports[stream].send(form.total(encoded))
                item = form, ticket, encoded.numel, forecast, stream, self._sent, why
                self._waiting.append(Counting(weakref.ref(encoded), *item))
        return encoded

    def _packed_within(self, form: Sparse, x: torch.Tensor, forecast: Forecast | None, capacity: int) -> Encoded | None:
        """The encoding of x in arrays as large as forecast; None where the host has no memory for what may be more."""
        assert self._spill is not None
        memory = self._spill.take(form.spill_bytes(x.numel(), x.dtype, capacity), x)
        if memory is None:
            return None
        self._next(False)
        ticket = self._transports[stream_of(x)].open(x.device)
        encoded = form.begin_within(x, capacity, memory, ticket.slot)
        ticket.sent()
        self._within.append(Counting(weakref.ref(encoded), form, ticket, x.numel(), forecast, capacity=capacity))
        return encoded

    def encode_for_host(self, form: Codec, x: torch.Tensor) -> Encoded:
        """The encoding of x, pending where an offloader packs it on its way; another sparse one in its exact size, for
        which the device is waited for. It counts as one of the ``lag`` later encodings."""
        if not isinstance(form, Sparse) or self.at_once(x):
            return form.encode(x)
        with self._lock:
            self._next(self._bounded)
        encoded = form.begin(x)
        if encoded.pending and not form.packs_within:
            form.settle(encoded, int(form.total(encoded)))
        return encoded

    def _next(self, wait: bool) -> None:
        """Count an encoding that begins now, and settle what it makes due."""
        self._sent += 1
        newest = self._sent - self._lag
        self._settle(lambda item: item.number <= newest, wait)

    def count(self, x: torch.Tensor, forecast: Forecast) -> None:
        """Tell the forecast the share of elements of a dense x whose bit pattern is not zero, once it has reached the
        host; never waits."""
        n, total = max(x.numel(), 1), torch.count_nonzero(bits_of(flat(x)))
        if self.at_once(x):
            forecast.heard(int(total) / n)
            return
        with self._lock:
            ticket = self._transports[stream_of(x)].send(total)
            self._within.append(Counting(lambda: None, None, ticket, n, forecast, capacity=n))

    def poll(self) -> int:
        """Settle every delayed encoding of the current stream and those within a forecast, oldest first, whose counts
        have arrived; how many there were. Never waits for the device."""
        if not (self._waiting or self._within) or capturing():
            return 0
        with self._lock:
            return self._hear() + self._settle(lambda _: True, wait=False)

    def settle_first(self) -> None:
        """Settle the delayed encodings of the current stream of whose storages nothing was known, and wait for their
        counts: then there is a forecast for the next step."""
        if capturing():
            return
        with self._lock:
            self._settle(lambda item: item.why == FIRST, wait=True)

    def settle(self, encoded: Encoded) -> None:
        """Settle one delayed encoding of the current stream, and wait for its count if it has not arrived."""
        if encoded.pending and not capturing():
            with self._lock:
                self._settle(lambda item: item.encoded() is encoded, wait=True)

    def listen(self) -> None:
        """Take in the counts that have arrived: those of encodings within a forecast give back what they can, the
        others are noted, and none is packed, which takes memory beside the scratch. Never waits for the device."""
        if capturing():
            return
        with self._lock:
            self._hear()
            for item in self._waiting:
                encoded, total = item.encoded(), item.ticket.ready()
                if total is not None:
                    item.tell(total)
                    if encoded is not None:
                        encoded.nonzeros = total

    def _hear(self) -> int:
        """Take in the arrived counts of encodings within a forecast, oldest first; how many are still wanted."""
        wanted = 0
        while self._within:
            total = self._within[0].ticket.ready()
            if total is None:
                break
            wanted += self._within[0].arrived(total)
            self.beyond += total > self._within.popleft().capacity
        return wanted

    def _settle(self, is_due: Callable[[Counting], bool], wait: bool) -> int:
        """Settle delayed encodings that are due, and take in the counts of those that nobody wants any more: they may
        still be of use. Should one fail, the list still holds it and the next call retries."""
        left: list[Counting] = []
        settled = 0
        for item in self._waiting:
            wanted = item.encoded() is not None
            due = not wanted or (is_due(item) and is_current(item.stream))
            total = item.ticket.ready() if due else None
            if total is None and due and wanted and wait:
                self.waits[item.why] += 1
                total = item.ticket.wait()
            if total is not None:
                settled += item.arrived(total)
            elif wanted or item.forecast is not None:
                left.append(item)
        self._waiting = left
        return settled
