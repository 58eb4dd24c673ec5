"""Where a forward is cut into segments of which backward keeps only what crosses, and which of them it runs again.

The cuts are made where little crosses: behind an operator, once what would be kept of the segment takes ``factor``
times the bytes that later operators read of it and of all before. Pure data."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

Made = TypeVar("Made")
FACTORS = 2, 3, 4, 8, 16  # the least that is kept of a segment, in multiples of what crosses behind it


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
    """What was made with ``count`` of ``segments``, the last included, and its peak."""

    made: Made
    peak_bytes: int
    count: int
    segments: int


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
    """The segments at each of ``FACTORS`` where there are any."""
    return [found for factor in FACTORS if (found := segments(operators, factor))]


def fewest(
    divisions: Sequence[Sequence[Segment]], made: Callable[[Sequence[Segment]], Made], peak: Callable[[Made], int],
    budget_bytes: int, peak_bytes: int,
) -> Found[Made] | None:  # fmt: skip
    """As few of the first segments as fit in a budget, of the division of forward that takes the least time for what is
    missing; ``peak_bytes``: without segments. Where none fits, all of the division with the least peak; None where
    nothing is missing, or without divisions."""
    whole = list[tuple[float, Sequence[Segment], Found[Made]]]()
    for division in divisions if peak_bytes > budget_bytes else ():
        done = made(division)
        found = Found(done, peak(done), len(division), len(division) + 1)
        missing = (peak_bytes - budget_bytes) / max(1, peak_bytes - found.peak_bytes)
        whole.append((_time_s(division, missing), division, found))
    fitting = [each for each in whole if each[2].peak_bytes <= budget_bytes]
    if not fitting:
        return min((found for *_, found in whole), key=lambda found: found.peak_bytes, default=None)
    _, division, found = min(fitting, key=lambda each: each[0])
    tried = {found.count: found}

    def enough(count: int) -> bool:
        done = made(division[:count])
        tried[count] = replace(found, made=done, peak_bytes=peak(done), count=count)
        return tried[count].peak_bytes <= budget_bytes

    return tried[bisect_left(range(found.count), True, 1, key=enough)]


def _time_s(division: Sequence[Segment], share: float) -> float:
    """What the first segments take that free a share of what all do."""
    sums = list(accumulate(max(0, s.freed_bytes) for s in division))
    return sum(s.time_s for s in division[: bisect_left(sums, share * sums[-1]) + 1])
