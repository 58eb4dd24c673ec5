"""Segments that run anew in backward (checkpoints): which tasks, from when on, at what passing cost in memory.

Chen et al.'s checkpointing, the comparison of Gist section VI and vDNN section V: what a segment keeps is dropped, and
at its first use in backward its forward runs anew from ``sources``. Decisions with equal ``sources`` are one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gistkit.errors import PlanError
from gistkit.plan.plan import Decision

if TYPE_CHECKING:
    from gistkit.plan.context import StepIndex

STATIC = ("weight", "buffer", "input")


@dataclass(frozen=True)
class Segment:
    """``blocks`` come back before task ``start`` through the forward ``tasks``; ``needs`` are others whose values
    must be there then; ``passing_bytes`` is what the rerun holds at its worst moment beyond ``blocks``."""

    start: int
    blocks: tuple[int, ...]
    tasks: tuple[int, ...]
    needs: tuple[int, ...]
    passing_bytes: int


def segments(decisions: Sequence[Decision], index: StepIndex, decided: Mapping[int, Decision]) -> tuple[Segment, ...]:
    """The segments of a plan's ``recompute`` decisions. Raises PlanError for a storage that backward does not need, and
    for one that no task of the step makes."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for decision in decisions:
        groups[decision.sources].append(index.block(decision.storage).id)
    return tuple(_segment(sorted(blocks), sources, index, decided) for sources, blocks in groups.items())


def _segment(blocks: list[int], sources: tuple[int, ...], index: StepIndex, decided: Mapping[int, Decision]) -> Segment:
    graph = index.graph
    held = [[*(u.task for u in graph.blocks[b].uses), graph.blocks[b].holder] for b in blocks]
    wanted = [t for tasks in held for t in tasks if t >= 0]
    if not wanted:
        names = [graph.blocks[b].storage for b in blocks]
        raise PlanError(f"storages {names}: recompute, but no backward task needs them; leave them out")
    tasks, needs = _closure(blocks, {index.block(s).id for s in sources}, index, decided)
    return Segment(min(wanted), tuple(blocks), tuple(tasks), tuple(sorted(needs)), _passing(tasks, set(blocks), index))


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
                again = read in decided and decided[read].codec == "recompute"
                if read in sources or (other.saved >= 0 and not again):
                    needs.add(read)
                else:
                    work.append(read)
    return sorted(tasks), needs


def _passing(tasks: list[int], kept: set[int], index: StepIndex) -> int:
    """Bytes beyond ``kept`` at the rerun's worst moment, everything of ``kept`` counted as there all the time."""
    graph = index.graph
    last: dict[int, int] = {}
    for position, task in enumerate(tasks):
        for block in (*graph.tasks[task].reads, *graph.tasks[task].writes):
            last[block] = position
    made: set[int] = set()
    worst = total = 0
    for position, task in enumerate(tasks):
        for block in graph.tasks[task].writes:
            if block not in kept and block not in made:
                made.add(block)
                total += graph.blocks[block].nbytes
        worst = max(worst, total + graph.tasks[task].transient_bytes)
        for block in [b for b in made if last[b] == position]:
            made.discard(block)
            total -= graph.blocks[block].nbytes
    return worst
