"""What may be chosen: for every kept storage its forms, segments on and off. Each is a *group*; a plan takes one
*variant* of every group. A storage's form that comes back with a segment goes with the segment's group: both are taken
or neither. A :class:`Delta` is what a variant adds to the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gistkit.formats import Lossy
from gistkit.ir import Block, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES, check_fidelity
from gistkit.planning.simulate import Effects, Load, Segment, StepIndex, load_of, trains_batch_norm

Options = Mapping[int, Sequence[Decision]]


@dataclass(frozen=True)
class Delta:
    """``memory`` as (task, bytes) in order: from the task on the step holds so many bytes more. ``extra`` as (task,
    seconds of compute), ``issued`` as (task, how many tasks more the host takes with it)."""

    memory: tuple[tuple[int, int], ...] = ()
    extra: tuple[tuple[int, float], ...] = ()
    loads: tuple[Load, ...] = ()
    issued: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def of(effects: Effects, costs: CostTable) -> Delta:
        tasks, steps, extra = len(costs.algorithms), defaultdict(int), defaultdict(float)
        for first, last, nbytes, _, _ in effects.intervals:
            if last >= max(first, 0) and first < tasks:
                steps[max(first, 0)] += nbytes
                if last + 1 < tasks:
                    steps[last + 1] -= nbytes
        for task, seconds in effects.extra_s:
            extra[task] += seconds
        memory = tuple((t, n) for t, n in sorted(steps.items()) if n)
        loads = tuple(load_of(t, costs) for t in effects.transfers)
        return Delta(memory, tuple((t, s) for t, s in sorted(extra.items()) if s), loads, effects.issued)

    @cached_property
    def seconds(self) -> float:
        """Seconds of compute, waiting for the link not counted."""
        return sum(s for _, s in self.extra)

    @cached_property
    def link_s(self) -> float:
        """Seconds on the link, with the link to itself."""
        return sum(load[3] for load in self.loads)


def level_of(deltas: Iterable[Delta], base_bytes: np.ndarray) -> np.ndarray:
    """Bytes by task of ``base_bytes`` and the deltas."""
    steps = np.zeros(len(base_bytes), dtype=np.int64)
    for delta in deltas:
        for task, nbytes in delta.memory:
            steps[task] += nbytes
    return base_bytes + np.cumsum(steps)


@dataclass(frozen=True)
class Allowed:
    """The class of moves: name, narrow formats, sub-batches under batch norm. Raises ValueError for unknown ones."""

    fidelity: str = "bitwise"
    lossy: Lossy = None
    batch_norm: bool = False

    def __post_init__(self) -> None:
        check_fidelity(self.fidelity, self.lossy)

    def admits(self, plan: Plan, graph: SavedGraph) -> bool:
        """Whether all of a plan's moves are of the class."""
        if FIDELITIES.index(plan.fidelity) > FIDELITIES.index(self.fidelity):
            return False
        return plan.sub_batches == 1 or self.part_counts(graph) != [1]

    def part_counts(self, graph: SavedGraph) -> list[int]:
        """Sub-batches to try: 1, powers of two up to the most, and that (the batch, if single rows go the same way)."""
        most = graph.most_parts
        if self.fidelity == "bitwise" or most < 2 or (trains_batch_norm(graph) and not self.batch_norm):
            return [1]
        return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


@dataclass(frozen=True)
class Variant:
    """One way to treat a storage (``decision``), or a segment, by number (-1: none runs anew); where both are given,
    the storage comes back with that segment."""

    decision: Decision | None = None
    segment: int = -1


def of_storages(
    index: StepIndex, listed: Options, segments: Sequence[Segment]
) -> tuple[list[Block], list[list[Variant]]]:
    """The groups of storages, each with its block: every form, and with every segment."""
    coming_back = defaultdict(list)
    for number, segment in enumerate(segments):
        for storage in (index.graph.blocks[b].storage for b in segment.blocks):
            again = Decision(storage, "recompute", "nowhere", sources=segment.sources, reason="runs anew in backward")
            coming_back[storage].append(Variant(again, number))
    known = {s: decisions for s, decisions in listed.items() if s in index.by_storage}
    groups = [[*(Variant(d) for d in decisions), *coming_back[s]] for s, decisions in known.items()]
    return [index.by_storage[s] for s in known], groups
