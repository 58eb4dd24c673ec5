"""What a step's intervals need under different allocators: Gist's static sharing, its investigation baseline, dynamic
allocation.

Gist section IV-C: CNTK's allocator sorts data structures by size and forms groups of such whose lifetimes do not
overlap; a group is as large as its largest member. Section V-A: the *investigation baseline* shares no memory between
stashed maps. Section V-H: *dynamic* allocation holds each structure only while it lives. Gist's figures leave weights,
their gradients and workspace out: :func:`feature_maps`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gistkit.ir.saved_graph import SavedGraph
from gistkit.ir.tasks import BACKWARD
from gistkit.planning.simulate.intervals import Interval
from gistkit.planning.simulate.simulator import Profile

_MAPS = ("dense", "payload", "mask", "decoded", "scratch", "gradient")


@dataclass(frozen=True)
class Sharing:
    """Groups of intervals that share memory, in the order in which they were opened, largest first; ``total_bytes`` is
    the sum of the groups' sizes, a group's size that of its first member."""

    groups: tuple[tuple[Interval, ...], ...]

    @property
    def total_bytes(self) -> int:
        return sum(group[0].nbytes for group in self.groups)


class _Group:
    """Members that never overlap, looked up by where they begin."""

    def __init__(self) -> None:
        self.members: list[Interval] = []
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def take(self, interval: Interval) -> bool:
        """Take the interval in, if it overlaps nobody."""
        at = bisect_left(self._firsts, interval.first)
        if at < len(self._firsts) and self._firsts[at] <= interval.last:
            return False
        if at > 0 and self._lasts[at - 1] >= interval.first:
            return False
        self._firsts.insert(at, interval.first)
        self._lasts.insert(at, interval.last)
        self.members.append(interval)
        return True


def static_sharing(intervals: Iterable[Interval]) -> Sharing:
    """Gist's static allocation (section IV-C): by size, largest first, each into the first group where it overlaps
    nobody, else into a new one."""
    groups: list[_Group] = []
    for interval in sorted(intervals, key=lambda i: (-i.nbytes, i.first, i.last, i.block)):
        if not any(group.take(interval) for group in groups):
            groups.append(_Group())
            groups[-1].take(interval)
    return Sharing(tuple(tuple(g.members) for g in groups))


def investigation_bytes(intervals: Sequence[Interval], turn: int) -> int:
    """Gist's investigation baseline (section V-A): stashed maps, which live from the forward into the backward that
    begins at task ``turn``, each for themselves; everything else shared statically."""
    stashed = [i for i in intervals if i.first < turn <= i.last]
    others = [i for i in intervals if not i.first < turn <= i.last]
    return sum(i.nbytes for i in stashed) + static_sharing(others).total_bytes


def dynamic_bytes(intervals: Iterable[Interval]) -> int:
    """Dynamic allocation (section V-H): the most that lives at once."""
    change: dict[int, int] = defaultdict(int)
    for interval in intervals:
        change[interval.first] += interval.nbytes
        change[interval.last + 1] -= interval.nbytes
    total = peak = 0
    for moment in sorted(change):
        total += change[moment]
        peak = max(peak, total)
    return peak


def feature_maps(graph: SavedGraph, profile: Profile) -> tuple[Interval, ...]:
    """What Gist counts (section V-A): stashed and immediately consumed maps, gradient maps; no weights, weight
    gradients, inputs or workspace. The network's result goes with its last reader: a training loop of Python's holds it
    to the end, the papers' frameworks have none."""
    read = {b: t.index for t in graph.tasks for b in (*t.reads, *t.writes)}
    return tuple(
        i if i.last < len(graph.tasks) else i._replace(last=read[i.block])
        for i in profile.intervals
        if i.what in _MAPS and i.block >= 0 and graph.blocks[i.block].kind in ("activation", "gradient")
    )


def turn_of(graph: SavedGraph) -> int:
    """The first backward task, the number of tasks where there is none."""
    return next((t.index for t in graph.tasks if t.phase == BACKWARD), len(graph.tasks))
