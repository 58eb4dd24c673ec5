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
GUESSES = 3


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
    return [part for each in found for part in (each, each[1:]) if part]


def fewest(
    divisions: Sequence[Sequence[Segment]], made: Callable[[Sequence[Segment]], Made], peak: Callable[[Made], int],
    budget_bytes: int, peak_bytes: int,
) -> Found[Made] | None:  # fmt: skip
    """As few of the first segments as fit in a budget, of the division of forward that takes the least time for what is
    missing; ``peak_bytes``: without segments. Where none fits, all of the division with the least peak; None where
    nothing is missing, or without divisions."""

    def tried(division: Sequence[Segment], count: int) -> Found[Made]:
        done = made(division[:count])
        return Found(done, peak(done), count)

    missing, quickest, least = peak_bytes - budget_bytes, None, None
    if missing <= 0:
        return None
    for division in sorted(divisions, key=lambda each: _time_s(each, missing)):
        if quickest and _time_s(division, missing) >= quickest[0]:
            break  # this one and those behind it take longer, by the bytes that they free
        found = tried(division, len(division))
        least = min(least or found, found, key=lambda each: each.peak_bytes)
        if found.peak_bytes <= budget_bytes:
            needed = _freed(division)[-1] * missing / (peak_bytes - found.peak_bytes)
            fits = _time_s(division, needed), division, found
            quickest = min(quickest or fits, fits, key=lambda each: each[0])
    if quickest is None:
        return least
    _, division, found = quickest
    return _fewest_of(division, tried, found, budget_bytes, peak_bytes)


def _fewest_of(
    division: Sequence[Segment], tried: Callable[[Sequence[Segment], int], Found[Made]], enough: Found[Made],
    budget_bytes: int, peak_bytes: int,
) -> Found[Made]:  # fmt: skip
    """As few of a division's segments as fit, of which ``enough`` do: ``GUESSES`` times as many are tried as the bytes
    that they free let expect, then half of what is left."""
    freed, few, few_bytes, tries = _freed(division), 0, peak_bytes, 0
    while enough.count - few > 1:
        share = (few_bytes - budget_bytes) / (few_bytes - enough.peak_bytes)
        guess = bisect_left(freed, freed[few] + share * (freed[enough.count] - freed[few]))
        count = min(max(guess, few + 1), enough.count - 1) if tries < GUESSES else (few + enough.count) // 2
        found, tries = tried(division, count), tries + 1
        if found.peak_bytes <= budget_bytes:
            enough = found
        else:
            few, few_bytes = count, found.peak_bytes
    return enough


def _freed(division: Sequence[Segment]) -> list[int]:
    """Bytes that the first segments free, from none on."""
    return list(accumulate((max(0, s.freed_bytes) for s in division), initial=0))


def _time_s(division: Sequence[Segment], size: float) -> float:
    """What the first segments take that free ``size`` bytes; infinity where all free less."""
    freed = _freed(division)
    return sum(s.time_s for s in division[: bisect_left(freed, size)]) if freed[-1] >= size else inf
