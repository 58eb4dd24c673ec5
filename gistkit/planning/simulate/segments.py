"""Segments that run anew in backward (checkpoints): which tasks, from when on, at what passing cost in memory.

Chen et al.'s checkpointing, the comparison of Gist section VI and vDNN section V: what a segment keeps is dropped, and
at its first use in backward its forward runs anew from ``sources``. Decisions with equal ``sources`` are one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gistkit.errors import PlanError
from gistkit.ir import Decision, digest_bytes
from gistkit.planning.simulate.intervals import Interval

if TYPE_CHECKING:
    from gistkit.planning.simulate.context import StepIndex

STATIC = ("weight", "buffer", "input")
_WITHOUT_VALUES = ("mask1", "drop", "argmax4", "argmax8", "recompute")


def valued(storage: int, decided: Callable[[int], Decision | None], above: tuple[int, ...] = ()) -> bool:
    """Whether a storage is there in backward with its values whatever runs anew: kept in some form, or rebuilt from
    storages that are. ``decided`` gives a storage's decision, None for none; ``above``: what is rebuilt from it."""
    decision = decided(storage)
    if decision is None or decision.codec not in (*_WITHOUT_VALUES, "rebuild"):
        return True
    if decision.codec != "rebuild" or storage in above:
        return False
    return all(valued(s, decided, (*above, storage)) for s in decision.sources)


@dataclass(frozen=True)
class Segment:
    """``blocks`` come back before task ``start`` through the forward ``tasks``; ``needs`` are others whose values
    must be there then; ``passing_bytes`` is what the rerun holds at its worst moment beyond ``blocks`` and beyond what
    task ``start`` makes afterwards, ``compared_bytes`` what verifying it takes more (:mod:`gistkit.ir.comparison`).
    ``lent``: those of ``needs`` that are decoded for the rerun alone, and counted with it; ``unread``: those of
    ``blocks`` of which backward reads the shape alone, gone again within the rerun."""

    start: int
    blocks: tuple[int, ...]
    tasks: tuple[int, ...]
    needs: tuple[int, ...]
    passing_bytes: int
    compared_bytes: int = 0
    lent: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()

    def passing(self) -> tuple[Interval, ...]:
        """What the rerun holds in passing, as intervals."""
        found = ((self.passing_bytes, "transient"), (self.compared_bytes, "scratch"))
        return tuple(Interval(self.start, self.start, nbytes, -1, what) for nbytes, what in found)


def segments(
    decisions: Sequence[Decision],
    index: StepIndex,
    decided: Mapping[int, Decision],
    also: Mapping[int, Iterable[int]] | None = None,
) -> tuple[Segment, ...]:
    """The segments of a plan's ``recompute`` decisions; ``also``: tasks, by block, that need values besides the block's
    own uses. Raises PlanError for a storage that backward does not need, for one that no task of the step makes, and
    for sources that are not kept."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for decision in decisions:
        groups[decision.sources].append(index.block(decision.storage).id)
    return tuple(_segment(sorted(blocks), sources, index, decided, also or {}) for sources, blocks in groups.items())


def _segment(
    blocks: list[int],
    sources: tuple[int, ...],
    index: StepIndex,
    decided: Mapping[int, Decision],
    also: Mapping[int, Iterable[int]],
) -> Segment:
    graph = index.graph
    wanted = {b: list(also.get(b, ())) for b in blocks}
    for b in blocks:
        masked = b in decided and decided[b].mask
        wanted[b] += [u.task for u in graph.blocks[b].uses if u.values or not masked]
    holders = [graph.blocks[b].holder for b in blocks if graph.blocks[b].holder >= 0]
    start = min((t for listed in wanted.values() for t in listed), default=min(holders, default=-1))
    if start < 0:
        names = [graph.blocks[b].storage for b in blocks]
        raise PlanError(f"storages {names}: recompute, but no backward task needs them; leave them out")
    starts = {index.block(s).id for s in sources}
    for source in starts:
        if not _valued(source, index, decided):
            raise PlanError(
                f"storages {[graph.blocks[b].storage for b in blocks]}: recompute from storage "
                f"{graph.blocks[source].storage}, which {decided[source].codec!r} does not keep with its values; keep "
                "the source"
            )
    tasks, needs = _closure(blocks, starts, index, decided)
    unread = tuple(b for b in blocks if not wanted[b])
    found = Segment(start, tuple(blocks), tuple(tasks), tuple(sorted(needs)), 0, unread=unread)
    return lending(found, (), index)


def lends(decision: Decision | None) -> bool:
    """Whether a storage's values come of a payload, by a decode at each use."""
    return decision is not None and decision.codec not in ("dense", "bits", "rebuild", *_WITHOUT_VALUES)


def lending(segment: Segment, blocks: Iterable[int], index: StepIndex) -> Segment:
    """The segment with some of its ``needs`` decoded for the rerun alone: from the first of its tasks that reads them
    to the last, and gone before task ``start`` makes anything."""
    lent = tuple(sorted(blocks))
    back = set(segment.blocks).difference(segment.unread)
    passing = _passing(segment.tasks, back, index, lent) - _made_during(segment.start, index)
    # one block at a time
    compared = max((digest_bytes(index.graph.blocks[b].nbytes, _rows(b, index)) for b in back), default=0)
    compared_bytes = max(0, passing + compared) - max(0, passing)
    return replace(segment, passing_bytes=max(0, passing), compared_bytes=compared_bytes, lent=lent)


def _rows(block: int, index: StepIndex) -> int:
    shape = index.graph.storages[index.graph.blocks[block].storage].shape
    return shape[0] if shape else 1


def _valued(block: int, index: StepIndex, decided: Mapping[int, Decision]) -> bool:
    storage = index.graph.blocks[block].storage
    return storage < 0 or valued(storage, lambda s: decided.get(index.block(s).id))


def _made_during(task: int, index: StepIndex) -> int:
    """Bytes that a task makes itself, gradients above all: not yet there while the segment runs."""
    return index.made_bytes.get(task, 0) + index.graph.tasks[task].transient_bytes


def _closure(
    blocks: list[int], sources: set[int], index: StepIndex, decided: Mapping[int, Decision]
) -> tuple[list[int], set[int]]:
    """Forward tasks that make the blocks from the sources and from what is kept, in order; what they need of it."""
    graph = index.graph
    tasks: set[int] = set()
    needs, work, seen = set(sources), list(blocks), set(blocks)
    while work:
        block = graph.blocks[work.pop()]
        if not index.makers[block.id]:
            raise PlanError(f"storage {block.storage}: recompute, but no task of the forward makes it; keep it")
        tasks.update(index.makers[block.id])
        for task in index.makers[block.id]:
            for read in graph.tasks[task].reads:
                other = graph.blocks[read]
                if read in seen or other.kind in STATIC:
                    continue
                seen.add(read)
                if read in sources or (other.saved >= 0 and _valued(read, index, decided)):
                    needs.add(read)
                else:
                    work.append(read)
    return sorted(tasks), needs


def _passing(tasks: Sequence[int], kept: set[int], index: StepIndex, lent: tuple[int, ...]) -> int:
    """Bytes at the rerun's worst moment, what is ``lent`` among them, beyond those of ``kept`` when all of it is
    there."""
    graph = index.graph
    last: dict[int, int] = {}
    for position, task in enumerate(tasks):
        for block in (*graph.tasks[task].reads, *graph.tasks[task].writes):
            last[block] = position
    made: set[int] = set()
    total = -sum(graph.blocks[b].nbytes for b in kept)
    came: set[int] = set()
    worst = 0
    for position, task in enumerate(tasks):
        for block in (*(b for b in lent if b in graph.tasks[task].reads), *graph.tasks[task].writes):
            if block in made or block in came or graph.blocks[block].kind in STATIC:
                continue
            (came if block in kept else made).add(block)
            total += graph.blocks[block].nbytes
        worst = max(worst, total + graph.tasks[task].transient_bytes + _cast_bytes(task, index))
        for block in [b for b in made if last[b] == position]:
            made.discard(block)
            total -= graph.blocks[block].nbytes
    return worst


def _cast_bytes(task: int, index: StepIndex) -> int:
    """Autocast's copies of weights that a rerun of the task takes: its own, whether or not others live, for it runs
    without autocast's cache."""
    graph = index.graph
    found = (graph.blocks[b] for b in {*graph.tasks[task].reads, *graph.tasks[task].writes})
    return sum(b.nbytes for b in found if b.kind == "weight" and b.first >= 0)
