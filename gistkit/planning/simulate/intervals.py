"""What a plan does, as additive parts: intervals of memory, extra seconds by task, transfers. Pure data.

Named tuples where a search makes thousands of them for every plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Interval(NamedTuple):
    """``nbytes`` of memory during the tasks ``first`` to ``last``, both counted (-1: from before the step; the number
    of tasks: beyond it), for a block (-1: of no block). ``what`` says what it is."""

    first: int
    last: int
    nbytes: int
    block: int
    what: str


class Transfer(NamedTuple):
    """A storage's payload on the link, direction ``d2h`` or ``h2d``.

    A ``d2h`` may start once task ``issue`` has started (so it overlaps the last forward reader itself, vDNN section
    III-A), an ``h2d`` is issued when task ``issue`` starts; either is done before task ``due`` begins. Where both are
    the same task, the transfer is issued when the task before it ends.
    """

    storage: int
    nbytes: int
    direction: str
    issue: int
    due: int


@dataclass(frozen=True)
class Effects:
    """What one decision, or one task, does: its intervals, (task, extra seconds), transfers."""

    intervals: tuple[Interval, ...] = ()
    extra_s: tuple[tuple[int, float], ...] = ()
    transfers: tuple[Transfer, ...] = ()
