"""Segments that run anew in backward (Chen et al.'s checkpoints), at their first use, from ``sources``: which tasks,
when, what the rerun holds meanwhile. Decisions with equal ``sources`` are one segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gistkit.errors import PlanError
from gistkit.ir import OPERATORS, RERUN, Decision, by_key, digest_bytes, rerun_of
from gistkit.planning.simulate.intervals import Effects, Interval
from gistkit.planning.simulate.step_index import StepIndex

STATIC = ("weight", "buffer", "input")
MODULE_FACTOR, MODULE_TASKS = 2.0, 4.0
"""What a module that runs anew takes the host, in tasks of plain PyTorch: for each of its own, as what it saves passes
a hook twice, and besides. Of a small Llama on a CPU a layer of 34 tasks took 1.33 ms, a task of the step 18.5 us."""


def valued(storage: int, decided: Callable[[int], Decision | None], above: tuple[int, ...] = ()) -> bool:
    """Whether backward finds a storage's values without a rerun: kept in some form, or rebuilt from storages that are.
    ``decided`` gives a storage's decision, None for none; ``above`` are the storages that are rebuilt from it."""
    decision = decided(storage)
    if decision is None:
        return True
    if decision.form.returns == OPERATORS:
        return storage not in above and all(valued(s, decided, (*above, storage)) for s in decision.sources)
    return decision.form.values and decision.form.returns != RERUN


def check_sources(name: str, sources: Iterable[int], decided: Callable[[int], Decision | None]) -> None:
    """Raise PlanError for sources of a rerun, ``name`` what comes back, that are not there with their values."""
    for source in sources:
        decision = decided(source)
        if decision is not None and not valued(source, decided):
            raise PlanError(
                f"{name}: recompute from storage {source}, which {decision.codec!r} does not keep with its values; "
                "keep the source"
            )


@dataclass(frozen=True)
class Segment:
    """``blocks`` come back from the storages ``sources`` before task ``start``, by forward ``tasks`` from ``needs``.
    ``passing_bytes`` is what the rerun holds at its worst moment beyond ``blocks`` and beyond what task ``start`` makes
    afterwards, ``compared_bytes`` what verifying it takes on top (:mod:`gistkit.ir.returns`). ``decoded`` are those of
    ``needs`` that are decoded for the rerun alone, which counts them; of ``unread``, among ``blocks``, backward reads
    the shape only, so they are gone again when the rerun ends."""

    sources: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    tasks: tuple[int, ...]
    needs: tuple[int, ...]
    passing_bytes: int
    compared_bytes: int = 0
    decoded: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()

    def effects(self, task_s: Sequence[float], host_factor: float, whole: bool = False) -> Effects:
        """What the rerun adds to task ``start``, where the forward's tasks take ``task_s``; each of them takes the host
        ``host_factor`` tasks. ``whole``: a module runs anew."""
        start = self.start
        found = (self.passing_bytes, "transient"), (self.compared_bytes, "scratch")
        intervals = tuple(Interval(start, start, nbytes, -1, what) for nbytes, what in found)
        extra_s = ((start, sum(task_s[t] for t in self.tasks)),)
        issued = MODULE_FACTOR * len(self.tasks) + MODULE_TASKS if whole else host_factor * len(self.tasks)
        return Effects(intervals, extra_s, issued=((start, issued),))


def segments(
    decisions: Sequence[Decision],
    index: StepIndex,
    decided: Mapping[int, Decision],
    also: Mapping[int, Iterable[int]] | None = None,
) -> tuple[Segment, ...]:
    """The segments of a plan's ``recompute`` decisions. ``decided`` holds the plan's decisions by block, ``also`` the
    tasks, by block, that need values besides the block's own uses. Raises PlanError for a storage that backward does
    not need or no task makes, and for sources that are not kept."""
    groups = by_key((d.sources, index.block(d.storage).id) for d in decisions)
    return tuple(_segment(sorted(blocks), sources, index, decided, also or {}) for sources, blocks in groups.items())


def _segment(
    blocks: list[int],
    sources: tuple[int, ...],
    index: StepIndex,
    decided: Mapping[int, Decision],
    also: Mapping[int, Iterable[int]],
) -> Segment:
    graph = index.graph
    names = [graph.blocks[b].storage for b in blocks]
    masked = {b for b in blocks if b in decided and decided[b].mask}
    own = {b: [u.task for u in graph.blocks[b].uses if u.values or b not in masked] for b in blocks}
    read_at = {b: [*also.get(b, ()), *own[b]] for b in blocks}
    holders = [graph.blocks[b].holder for b in blocks if graph.blocks[b].holder >= 0]
    start = min((t for tasks in read_at.values() for t in tasks), default=min(holders, default=-1))
    if start < 0:
        raise PlanError(f"storages {names}: recompute, but no backward task needs them; leave them out")
    starts = {index.block(s).id for s in sources}

    def kept(storage: int) -> Decision | None:
        return decided.get(index.block(storage).id)

    check_sources(f"storages {names}", sources, kept)

    def stays(block: int) -> bool:
        other = graph.blocks[block]
        if block in starts or other.kind in STATIC:
            return True
        return other.saved >= 0 and (other.storage < 0 or valued(other.storage, kept))

    found = rerun_of(blocks, index.makers, lambda task: graph.tasks[task].reads, stays)
    for block in found.inside:
        if not index.makers.get(block):
            storage = graph.blocks[block].storage
            raise PlanError(f"storage {storage}: recompute, but no task of the forward makes it; keep it")
    needs = starts | {b for b in found.needs if graph.blocks[b].kind not in STATIC}
    unread = tuple(b for b in blocks if not read_at[b])
    return decoding(
        Segment(sources, start, tuple(blocks), found.calls, tuple(sorted(needs)), 0, unread=unread), (), index
    )


def decoding(segment: Segment, blocks: Iterable[int], index: StepIndex) -> Segment:
    """The segment with some of its ``needs`` decoded for the rerun alone: from the first of its tasks that reads them
    to the last, and gone before task ``start`` makes anything."""
    decoded = tuple(sorted(blocks))
    back = set(segment.blocks).difference(segment.unread)
    # what a task makes itself, gradients above all, is not yet there while the segment runs
    made_bytes = index.made_bytes.get(segment.start, 0) + index.graph.tasks[segment.start].transient_bytes
    passing = _worst_bytes(segment.tasks, back, index, decoded) - made_bytes
    # one block is compared at a time
    compared = max((digest_bytes(index.graph.blocks[b].nbytes, index.rows(b)) for b in back), default=0)
    compared_bytes = max(0, passing + compared) - max(0, passing)
    return replace(segment, passing_bytes=max(0, passing), compared_bytes=compared_bytes, decoded=decoded)


def _worst_bytes(tasks: Sequence[int], back: set[int], index: StepIndex, decoded: tuple[int, ...]) -> int:
    """Bytes at the rerun's worst moment, ``decoded`` among them, beyond those of ``back`` when all of it is there."""
    graph = index.graph
    last: dict[int, int] = {}
    for position, task in enumerate(tasks):
        for block in (*graph.tasks[task].reads, *graph.tasks[task].writes):
            last[block] = position
    passing: set[int] = set()
    there: set[int] = set()
    worst, total = 0, -sum(graph.blocks[b].nbytes for b in back)
    for position, task in enumerate(tasks):
        for block in (*(b for b in decoded if b in graph.tasks[task].reads), *graph.tasks[task].writes):
            if block in passing or block in there or graph.blocks[block].kind in STATIC:
                continue
            (there if block in back else passing).add(block)
            total += graph.blocks[block].nbytes
        worst = max(worst, total + graph.tasks[task].transient_bytes + _cast_bytes(task, index))
        for block in [b for b in passing if last[b] == position]:
            passing.discard(block)
            total -= graph.blocks[block].nbytes
    return worst


def _cast_bytes(task: int, index: StepIndex) -> int:
    """Autocast's copies of weights: a rerun makes its own, for it runs without autocast's cache."""
    graph = index.graph
    found = (graph.blocks[b] for b in {*graph.tasks[task].reads, *graph.tasks[task].writes})
    return sum(b.nbytes for b in found if b.kind == "weight" and b.first >= 0)
