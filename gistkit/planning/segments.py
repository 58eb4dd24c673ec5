"""Where a forward is cut into segments of which backward keeps only what crosses: pure data.

The cuts are made where little crosses: behind an operator, once what would be kept of the segment takes ``factor``
times the bytes that later operators read of it and of all before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

Made = TypeVar("Made")


class Operator(NamedTuple):
    """An operator of forward: its result's storage and bytes, or None where that is no tensor, whether the storage is
    kept for backward, and the place of the last operator that reads it (-1: none does)."""

    name: str
    storage: int | None
    size: int
    kept: bool
    last: int


class Segment(NamedTuple):
    """Operators of forward, by name, and those whose results are kept, as later ones read them."""

    operators: tuple[str, ...]
    saved: tuple[str, ...]


def segments(operators: Sequence[Operator], factor: float) -> list[Segment]:
    """The segments in order, without the last, with which backward begins."""
    found, begun, kept_bytes, alive, seen = list[Segment](), 0, 0, list[Operator](), set[int | None]()
    for place, made in enumerate(operators):
        kept_bytes += made.size if made.kept and made.storage not in seen else 0
        seen.add(made.storage)
        alive = [o for o in (*alive, made) if o.last > place]
        crossing = sum({o.storage: o.size for o in alive}.values())
        if all(o.storage is not None for o in alive) and factor * crossing <= kept_bytes:
            names = tuple(o.name for o in operators[begun : place + 1])
            found.append(Segment(names, tuple(o.name for o in alive)))
            begun, kept_bytes = place + 1, 0
    return found


def fewest(
    segments: Sequence[Segment], made: Callable[[Sequence[Segment]], Made], fits: Callable[[Made], bool]
) -> tuple[Made, int]:
    """What is ``made`` with as few of the first segments as fit, and how many; with all where that does not fit."""
    tried = {len(segments): made(segments)}

    def enough(count: int) -> bool:
        tried[count] = made(segments[:count])
        return fits(tried[count])

    all_fit = fits(tried[len(segments)])
    count = bisect_left(range(len(segments)), True, 1, key=enough) if all_fit else len(segments)
    return tried[count], count
