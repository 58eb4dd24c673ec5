"""Where a forward is cut into segments of which backward keeps only what crosses, and which of them it runs again.

The cuts are made where little crosses: behind an operator, once what would be kept of the segment takes ``factor``
times the bytes that later operators read of it and of all before. Pure data."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Generic, NamedTuple, TypeVar

Made = TypeVar("Made")
FACTORS = 2, 3, 4, 8, 16  # the least that is kept of a segment, in multiples of what crosses behind it
_USUAL = 0.3  # of the modelled bytes: where the peak falls by less, another part of the step has the peak
_WORTH = 0.97  # of the quickest's time: what takes more is not tried


class Operator(NamedTuple):
    """An operator of forward: its result's storage and bytes, or None where that is no tensor; the bytes that are kept
    of it for backward before moves, and behind them; the place of the last operator that reads it (-1: none does); the
    time that it takes to run again, or None where it does not."""

    name: str
    storage: int | None
    size: int
    kept: int
    stays: int
    last: int
    time_s: float | None = 0.0


class Segment(NamedTuple):
    """Operators of forward that may run again, by name, and those whose results are kept, as later ones read them. To
    run them again frees ``freed_bytes`` and takes ``time_s``."""

    operators: tuple[str, ...]
    saved: tuple[str, ...]
    freed_bytes: int
    time_s: float


@dataclass(frozen=True)
class Found(Generic[Made]):
    """What was made with the first ``count`` segments, and its peak."""

    made: Made
    peak_bytes: int
    count: int


def segments(operators: Sequence[Operator], factor: float) -> list[Segment]:
    """The segments in order, without the last, with which backward begins, and without those before it of which more
    is kept than behind them: what backward runs again at once is there at its beginning anyhow."""
    found, begun, kept_bytes, stay_bytes, alive = list[Segment](), 0, 0, 0, list[Operator]()
    saved, within = set[int | None](), list[int]()
    for place, made in enumerate(operators):
        kept_bytes, stay_bytes = kept_bytes + made.kept, stay_bytes + made.stays
        alive = [o for o in (*alive, made) if o.last > place]
        crossing = sum({o.storage: o.size for o in alive if o.storage not in saved}.values())
        if all(o.storage is not None for o in alive) and factor * crossing <= kept_bytes > 0:
            own = [o for o in operators[begun : place + 1] if o.time_s is not None]
            saved |= {o.storage for o in alive}
            time_s = sum(o.time_s or 0.0 for o in own if o.storage not in saved)
            behind = tuple(o.name for o in alive)
            found.append(Segment(tuple(o.name for o in own), behind, stay_bytes - crossing, time_s))
            within.append(kept_bytes)
            begun, kept_bytes, stay_bytes = place + 1, 0, 0
    while found and kept_bytes < within[-1]:
        kept_bytes += within.pop()
        found.pop()
    return found


def divided(operators: Sequence[Operator]) -> list[list[Segment]]:
    """The segments at each of ``FACTORS`` where there are any, with and without the first one: a convolution of images
    takes long for what it frees (as modelled for a ResNet-50, 0.9 ms for 230 MiB; the next block 0.3 ms for 290)."""
    found = [segments(operators, factor) for factor in FACTORS]
    parts = [part for each in found for part in (each, each[1:]) if part]
    return [part for place, part in enumerate(parts) if part not in parts[:place]]


@dataclass
class _Known:
    """What tries have shown of a division: its first ``few`` segments are too few, and the peak falls by ``gain_bytes``
    with them; ``enough`` and more need not be tried, as they fit or are no better; ``share``: of the bytes that they
    free as modelled, those by which the peak fell at the last try."""

    division: Sequence[Segment]
    enough: int
    few: int = 0
    gain_bytes: int = 0
    share: float | None = None

    def guess(self, missing: int, usual: float) -> int | None:
        """How many segments to try next: all where ``share`` lets expect that all are too few, though they would do as
        modelled, and one fewer than fit where it lets expect more. None where no number is worth it."""
        freed = _freed(self.division)
        count = max(self.few + 1, bisect_left(freed, missing / (self.share or usual)))
        if self.enough <= len(self.division) or freed[-1] >= missing:
            count = min(count, self.enough - 1)
        return count if self.few < count < self.enough else None

    def learn(self, count: int, gain_bytes: int, fits: bool) -> float:
        """Take in a try; the share of the modelled bytes by which the peak fell."""
        self.share = max(gain_bytes, 1) / max(_freed(self.division)[count], 1)
        if fits:
            self.enough = count
        else:
            if gain_bytes <= self.gain_bytes:  # another part of the step has the peak
                self.enough = count + 1
            self.few, self.gain_bytes = count, gain_bytes
        return self.share

    def time_s(self, count: int) -> float:
        return sum(segment.time_s for segment in self.division[:count])


def fewest(
    divisions: Sequence[Sequence[Segment]], made: Callable[[Sequence[Segment]], Made], peak: Callable[[Made], int],
    budget_bytes: int, peak_bytes: int,
) -> Found[Made] | None:  # fmt: skip
    """As few of the first segments of a division as fit in a budget, of the division with which they take least time by
    the model; ``peak_bytes``: without segments. What may be the quickest is tried first: of each division as many
    segments as free what is missing, where the peak falls by such a share of the modelled bytes as in the tries before.
    Where none fits, the least peak; None where nothing is missing, or without divisions."""
    missing, usual, quickest, least, least_s = peak_bytes - budget_bytes, 1.0, None, None, inf
    if missing <= 0:
        return None
    known = [_Known(division, len(division) + 1) for division in divisions]

    def tried(each: _Known, count: int) -> Found[Made]:
        done = made(each.division[:count])
        return Found(done, peak(done), count)

    while True:
        guesses = ((each.guess(missing, usual), each) for each in known)
        timed = [(each.time_s(count), count, place) for place, (count, each) in enumerate(guesses) if count]
        next_s, count, place = min(timed, default=(inf, 0, 0))
        if next_s >= _WORTH * least_s:
            break
        found = tried(known[place], count)
        fits = found.peak_bytes <= budget_bytes
        share = known[place].learn(count, peak_bytes - found.peak_bytes, fits)
        usual = share if share > _USUAL else usual
        least = min(least or found, found, key=lambda each: each.peak_bytes)
        if fits:
            quickest, least_s = found, next_s
    whole = [each for each in known if each.few < len(each.division)] if quickest is None else []
    for each in sorted(whole, key=lambda each: each.time_s(len(each.division))):
        found = tried(each, len(each.division))
        if found.peak_bytes <= budget_bytes:
            return found
        least = min(least or found, found, key=lambda each: each.peak_bytes)
    return quickest or least


def _freed(division: Sequence[Segment]) -> list[int]:
    """Bytes that the first segments free, from none on."""
    return list(accumulate((max(0, s.freed_bytes) for s in division), initial=0))
