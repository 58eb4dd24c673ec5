"""Segments of the forward that `optimal` may run anew in backward: checkpointing as a move among others.

A candidate names the storages that come back and the sources that it starts from; its seconds, its passing memory and
what else it needs are those of :mod:`gistkit.planning.simulate.segments`. Candidates are the segments of other
policies' plans
(Chen et al.'s, of several counts), runs of one or more of the network's parts between two places where a single feature
map is read across (a residual block, an inception block, a layer of a chain), and single convolutions with the cheap
operations behind them, of which the wide output comes back from a narrower input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

from gistkit.errors import PlanError
from gistkit.ir import FORWARD, Block, Decision, Plan, SavedGraph
from gistkit.planning.forms import SMALL_BYTES, Replays, held
from gistkit.planning.policies.checkpoint import Cut, cuts, evenly, inputs, rerun_between
from gistkit.planning.simulate import NO_VALUES, Segment, StepIndex, segments

COUNTS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Numbers of even segments, in units of the square root of the number of places."""
RUNS = (1, 2, 3, 4, 6)
FRAMES = (1, 2, 3)
FEW_PLACES = 40
"""Up to so many places a run may begin at any of them, beyond only behind another of its length."""
MANY_PLACES = 150
"""With more places than that, runs of one and two parts and the even segments are candidates."""


@dataclass(frozen=True)
class Candidate:
    """``storages`` come back from ``sources`` as ``segment`` says."""

    sources: tuple[int, ...]
    storages: tuple[int, ...]
    segment: Segment

    def decision(self, storage: int) -> Decision:
        """What a storage of it is decided to do."""
        others = len(self.storages) - 1
        beside = "" if others == 0 else f" with {others} other{'s' if others > 1 else ''}"
        reason = f"runs anew in backward{beside}"
        return Decision(storage, "recompute", "nowhere", sources=self.sources, reason=reason)


def candidates(
    index: StepIndex, options: Mapping[int, Sequence[Decision]], seeds: Iterable[Plan]
) -> tuple[Candidate, ...]:
    """The segments that may run anew, each once. ``options`` by storage say what may come back at all: what may also be
    kept as it is, if that is all that may be done with it, and is made in the forward by no op for itself."""
    graph = index.graph
    replays = Replays(graph)
    fixed = replays.own | replays.late
    able = {s for s, listed in options.items() if s not in fixed and _may_return(index, s, listed)}
    silent = {index.by_storage[s].id: d[0] for s, d in options.items() if _silent(d) and s in index.by_storage}
    made: dict[tuple, Candidate] = {}
    for sources, storages in (*_of_seeds(seeds), *_between(graph), *_behind_convolutions(index)):
        members = tuple(sorted(able.intersection(storages)))
        key = (sources, members)
        if key in made or sum(index.by_storage[s].nbytes for s in members) < SMALL_BYTES:
            continue
        found = _candidate(index, replays, sources, members, silent)
        if found is not None and all(_is_there(graph, b, options) for b in found.segment.needs):
            made[key] = found
    return tuple(made.values())


def even_plans(graph: SavedGraph) -> tuple[Plan, ...]:
    """Checkpoint plans of several counts of segments, and of as many as there may be, to start from."""
    places = cuts(graph)
    root = isqrt(len(places) + 1)
    counts = sorted({min(len(places) + 1, max(2, round(root * share))) for share in COUNTS})
    chosen = [list(places[::length]) for length in FRAMES] + [evenly(graph, places, count) for count in counts]
    replays = Replays(graph)
    silent = replays.own | replays.late
    made = (tuple(replays.able(rerun_between(graph, found, silent))) for found in chosen if found)
    return tuple(Plan("optimal", graph.fingerprint, decisions, ()) for decisions in made)


def _is_there(graph: SavedGraph, block: int, options: Mapping[int, Sequence[Decision]]) -> bool:
    """Whether a block that is needed is kept in some way, or lives longer than the step."""
    return graph.blocks[block].storage in options or graph.blocks[block].last >= len(graph.tasks)


def _may_return(index: StepIndex, storage: int, listed: Sequence[Decision]) -> bool:
    block = index.by_storage.get(storage)
    if block is None or block.kind != "activation" or block.last >= len(index.graph.tasks) or block.first < 0:
        return False
    kept = any(d.codec == "dense" and d.place == "device" for d in listed)
    return kept and bool(index.makers[block.id]) and (bool(block.uses) or block.holder >= 0)


def _silent(listed: Sequence[Decision]) -> bool:
    """Nothing of its values is ever kept, so what is run anew goes through it."""
    return all(d.codec in NO_VALUES for d in listed)


def _candidate(
    index: StepIndex,
    replays: Replays,
    sources: tuple[int, ...],
    members: tuple[int, ...],
    silent: Mapping[int, Decision],
) -> Candidate | None:
    decisions = [Decision(s, "recompute", "nowhere", sources=sources) for s in members]
    decided = {**silent, **{index.block(d.storage).id: d for d in decisions}}
    try:
        (segment,) = segments(decisions, index, decided)
    except PlanError:
        return None
    if silent.keys() & set(segment.needs):
        return None
    known = {index.graph.blocks[b].storage: d for b, d in decided.items()}
    refused = replays.under(known).refuses(set(members), sources)
    return None if refused else Candidate(sources, members, segment)


def _of_seeds(seeds: Iterable[Plan]) -> Iterator[tuple[tuple[int, ...], set[int]]]:
    for plan in seeds:
        groups: dict[tuple[int, ...], set[int]] = {}
        for d in plan.decisions:
            if d.codec == "recompute":
                groups.setdefault(d.sources, set()).add(d.storage)
        yield from groups.items()


def _between(graph: SavedGraph) -> Iterator[tuple[tuple[int, ...], set[int]]]:
    """Runs of neighbouring parts, the first of them from what is put in."""
    places = cuts(graph)
    kept = held(graph)
    for end in places[: RUNS[-1]]:
        yield inputs(graph), {b.storage for b in kept if 0 <= b.first <= end.task and b.id != end.block}
    for length in RUNS if len(places) <= MANY_PLACES else RUNS[:2]:
        step = 1 if len(places) <= FEW_PLACES else length
        for i in range(0, len(places) - length, step):
            yield _part(graph, kept, places[i], places[i + length])


def _part(graph: SavedGraph, kept: Sequence[Block], begin: Cut, end: Cut) -> tuple[tuple[int, ...], set[int]]:
    """What is made between two places, from the map that is read across the first."""
    inside = {b.storage for b in kept if begin.task < b.first <= end.task and b.id != end.block}
    return (graph.blocks[begin.block].storage,), inside


def _behind_convolutions(index: StepIndex) -> Iterator[tuple[tuple[int, ...], set[int]]]:
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
        yield (graph.blocks[source].storage,), {graph.blocks[b].storage for b in made if b not in read}


__all__ = ["Candidate", "candidates"]
