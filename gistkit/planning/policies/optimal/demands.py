"""What rebuilds and reruns ask of the storages that they start from, read once for all ways of keeping these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from gistkit.ir import Block
from gistkit.planning.forms import MAX_DEPTH
from gistkit.planning.policies.optimal.joints import Event
from gistkit.planning.policies.optimal.problem import Key
from gistkit.planning.simulate import Segment, StepIndex, decoding, used_at

BySource = Mapping[int, Sequence["Demand"]]
"""Demands by the block that they start from."""


@dataclass(frozen=True, eq=False)
class Demand:
    """A rebuild: its key, its block, the tasks at which it needs its sources, how it is cut, its sources' blocks. Or a
    segment that runs anew: its block is negative, the same for all that start from one storage, as two of them would
    be one to the plan. ``borrows``: the segment, if there is one; ``coded``: those of its sources that may be kept in
    a form that is decoded, for the segment alone where nothing else needs it then."""

    key: Key
    block: int
    tasks: frozenset[int]
    slices: tuple[tuple[int, int], ...]
    sources: tuple[int, ...]
    borrows: Segment | None = None
    coded: frozenset[int] = frozenset()

    def excludes(self, other: Demand) -> bool:
        """Whether the two never go together: ways of one block, segments that bring one back or that are one."""
        again = self.borrows and other.borrows and set(self.borrows.blocks) & set(other.borrows.blocks)
        return bool(again) or self.block == other.block


@dataclass(frozen=True)
class Need:
    """Demands that need a block together (``event``: their keys): the tasks at which, how those are cut. ``fewer``: the
    events in it, without which it cannot be. ``lent``: where the block is kept in a form that is decoded, the tasks
    before which it is for a rerun alone, with the bytes that this takes more."""

    event: Event
    demands: tuple[Demand, ...]
    tasks: frozenset[int]
    slices: tuple[tuple[int, int], ...]
    fewer: tuple[Event, ...]
    lent: tuple[tuple[int, int], ...]


def needs_of(block: Block, by_source: BySource, index: StepIndex) -> list[Need]:
    """All that may need a block: each demand that starts from it, those behind it with it, and two of which one would
    have it decoded for itself alone at a task at which the other needs it too. Fewer demands before more."""
    return [_need(block, demands, index) for demands in _events(block.id, by_source)]


def _events(block: int, by_source: BySource) -> Iterator[tuple[Demand, ...]]:
    """The demands of :func:`needs_of`."""
    direct = by_source.get(block, ())
    work: list[tuple[Demand, ...]] = [(demand,) for demand in direct]
    for chain in work:
        yield chain
        if chain[0].block >= 0 and len(chain) <= MAX_DEPTH:
            work += [(further, *chain) for further in by_source.get(chain[0].block, ()) if further not in chain]
    for a, b in combinations(direct, 2):
        lent = any(d.borrows is not None and block in d.coded for d in (a, b))
        if lent and not a.excludes(b) and a.tasks & b.tasks:
            yield a, b


def _need(block: Block, demands: tuple[Demand, ...], index: StepIndex) -> Need:
    event = tuple(d.key for d in demands)
    tasks = demands[0].tasks if len(demands) == 1 else frozenset().union(*(d.tasks for d in demands))
    slices = tuple(dict(item for d in demands for item in d.slices).items())
    fewer = {e for i in range(len(event)) for e in (event[i:], event[i : i + 1])} - {event}
    lent: dict[int, int] = {}
    for demand in demands:
        if demand.borrows is not None and _borrows(demand.borrows.start, demand, block, demands):
            one = len(demand.coded) < 2
            lent[demand.borrows.start] = more_bytes(demand.borrows, (block.id,), index) if one else 0
    return Need(event, demands, tasks, slices, tuple(fewer), tuple(lent.items()))


def _borrows(start: int, demand: Demand, block: Block, demands: Sequence[Demand]) -> bool:
    """Whether a source that is decoded would be for a rerun and for nothing else at that time: it does not start there
    by way of another's rebuild either."""
    if block.id not in demand.coded or used_at(block, start):
        return False
    return not any(d.block in demand.sources or start in d.tasks for d in demands if d is not demand)


def more_bytes(segment: Segment, blocks: Iterable[int], index: StepIndex) -> int:
    """Bytes that a rerun takes more for some decoded sources."""
    with_them = decoding(segment, blocks, index)
    return sum(i.nbytes for i in with_them.passing()) - sum(i.nbytes for i in segment.passing())


def chains(chain: tuple[Demand, ...], by_source: BySource) -> Iterator[Event]:
    """The chains of MAX_DEPTH + 1 rebuilds that begin so."""
    if len(chain) > MAX_DEPTH:
        yield tuple(d.key for d in chain)
        return
    for further in by_source.get(chain[-1].block, ()):
        yield from chains((*chain, further), by_source)
