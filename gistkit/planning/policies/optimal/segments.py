"""Segments of the forward that `optimal` may run anew in backward: checkpointing as a move among others. Candidates
(:mod:`gistkit.planning.simulate.segments`) are the parts of layouts, and single convolutions with the cheap operations
behind them, of which the wide output comes back from a narrower input. A *layout* cuts the network at every so many of
the places where little is read across (between blocks or layers), as Chen et al. do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt

from gistkit.errors import PlanError
from gistkit.ir import FORWARD, Decision, SavedGraph
from gistkit.planning.forms import SMALL_BYTES, Replays, held
from gistkit.planning.policies.checkpoint import cuts, inputs, small_storages, sources_of
from gistkit.planning.simulate import Segment, StepIndex, segments

LENGTHS = (1, 2, 3, 4, 6)  # places from one cut to the next
SHARES = (0.5, 0.7, 1.0, 1.4, 2.0)  # further numbers of cuts, in units of the square root of the number of places
FEW_PLACES = 40  # up to so many places a layout may begin at any of them
MANY_PLACES = 150  # with more places than that only the first two LENGTHS are looked at
Part = tuple[tuple[int, ...], frozenset[int]]
"""Sources and the storages that are made from them."""


def candidates(
    index: StepIndex, options: Mapping[int, Sequence[Decision]], captured: bool = False
) -> tuple[tuple[Segment, ...], list[set[int]]]:
    """The segments that may run anew, each once, and by layout the numbers of its candidates. ``options`` by storage
    say what may come back at all: what may also be kept as it is, and is made in the forward by no op for itself."""
    maker = _Maker(index, options, captured)
    layouts = [maker.numbers(parts) for parts in _layouts(index.graph)]
    maker.numbers(_behind_convolutions(index))
    return tuple(maker.found), [layout for layout in layouts if layout]


class _Maker:
    def __init__(self, index: StepIndex, options: Mapping[int, Sequence[Decision]], captured: bool) -> None:
        self._index, self._options, self._replays = index, options, Replays(index.graph, captured=captured)
        fixed = self._replays.own | self._replays.late | small_storages(index.graph)
        self._able = {s for s, listed in options.items() if s not in fixed and self._may_return(s, listed)}
        # nothing of their values is ever kept, so what is run anew goes through them
        silent = {s: listed[0] for s, listed in options.items() if not any(d.form.values for d in listed)}
        self._silent = {index.by_storage[s].id: d for s, d in silent.items() if s in index.by_storage}
        self._known: dict[Part, int] = {}
        self.found: list[Segment] = []

    def _may_return(self, storage: int, listed: Sequence[Decision]) -> bool:
        block = self._index.by_storage.get(storage)
        if block is None or block.kind != "activation" or block.last >= len(self._index.graph.tasks) or block.first < 0:
            return False
        kept = any(d.stays for d in listed)
        return kept and bool(self._index.makers[block.id]) and (bool(block.uses) or block.holder >= 0)

    def numbers(self, parts: Iterable[Part]) -> set[int]:
        """The candidates of some parts, by their numbers among ``found``."""
        numbers = set()
        for sources, storages in parts:
            part = sources, frozenset(self._able.intersection(storages))
            if part not in self._known:
                candidate = self._candidate(*part)
                self._known[part] = len(self.found) if candidate else -1
                self.found += [candidate] if candidate else []
            numbers.add(self._known[part])
        return numbers - {-1}

    def _candidate(self, sources: tuple[int, ...], storages: frozenset[int]) -> Segment | None:
        graph, members = self._index.graph, tuple(sorted(storages))
        if sum(self._index.by_storage[s].nbytes for s in members) < SMALL_BYTES:
            return None
        decisions = [Decision(s, "recompute", "nowhere", sources=sources) for s in members]
        decided = {**self._silent, **{self._index.block(d.storage).id: d for d in decisions}}
        try:
            (segment,) = segments(decisions, self._index, decided)
        except PlanError:
            return None
        known = {graph.blocks[b].storage: d for b, d in decided.items()}
        if self._silent.keys() & set(segment.needs) or self._replays.under(known).refuses(set(members), sources):
            return None
        needed = (graph.blocks[b] for b in segment.needs)
        there = all(b.storage in self._options or b.last >= len(graph.tasks) for b in needed)
        return segment if there else None


def _layouts(graph: SavedGraph) -> Iterator[list[Part]]:
    """Parts from the step's inputs to the first cut, and from each cut to the next."""
    places = cuts(graph)
    root = sqrt(len(places) + 1)
    lengths = {*LENGTHS[: None if len(places) <= MANY_PLACES else 2], *(round(root / share) for share in SHARES)}
    kept = [(b.first, b.id, b.storage) for b in held(graph) if b.first >= 0]
    for length in sorted(length for length in lengths if 0 < length <= len(places)):
        few = length in LENGTHS and len(places) <= FEW_PLACES
        for offset in range(0 if few else length - 1, length):
            chosen = places[offset::length]
            starts = [inputs(graph), *(sources_of(graph, a, b) for a, b in pairwise(chosen))]
            begins = [-1, *(c.task for c in chosen)]
            yield [
                (sources, frozenset(s for first, b, s in kept if begin < first <= end.task and b not in end.blocks))
                for begin, sources, end in zip(begins, starts, chosen, strict=False)
            ]


def _behind_convolutions(index: StepIndex) -> Iterator[Part]:
    """Every convolution's output with what cheap operations make of it alone, from the convolution's input."""
    graph = index.graph
    forward = [t for t in graph.tasks if t.phase == FORWARD]
    maps = {b.id for b in graph.blocks if b.kind in ("activation", "input")}
    for position, task in enumerate(forward):
        read = maps.intersection(task.reads)
        if task.conv is None or len(read) != 1:
            continue
        made, known = set(task.writes), set(task.writes) | read
        for later in forward[position + 1 :]:
            if later.conv is not None:
                break
            if made.intersection(later.reads) and maps.intersection(later.reads) <= known:
                made.update(later.writes)
                known.update(later.writes)
        (source,) = read
        yield (graph.blocks[source].storage,), frozenset(graph.blocks[b].storage for b in made if b not in read)
