"""What may be chosen: for every kept storage its forms, for a convolution's task its algorithm, segments on and off.

Each is a *group*; a plan takes one *variant* of every group. A storage's form that comes back with a segment goes with
the segment's group: both are taken or neither. A :class:`Delta` is what a variant adds to the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gistkit.ir import Block, CallChoice, Decision, Plan, SavedGraph
from gistkit.planning.cost import Algorithm, CostTable
from gistkit.planning.forms import FIDELITIES, check_fidelity
from gistkit.planning.policies.optimal.segments import Candidate
from gistkit.planning.simulate import Effects, Load, StepIndex, load_of, trains_batch_norm

Options = Mapping[int, Sequence[Decision]]


@dataclass(frozen=True)
class Delta:
    """``memory`` as (task, bytes) in order: from the task on the step holds so many bytes more. ``extra`` as (task,
    seconds of compute), ``issued`` as (task, further tasks for the host)."""

    memory: tuple[tuple[int, int], ...] = ()
    extra: tuple[tuple[int, float], ...] = ()
    loads: tuple[Load, ...] = ()
    issued: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(effects: Effects, costs: CostTable) -> Delta:
        """The effects of a decision as the simulator has them."""
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
    """The class of moves: its name, its narrow format, sub-batches under batch norm, choice of algorithms. Raises
    ValueError for an unknown class or format."""

    fidelity: str = "bitwise"
    lossy: str | None = None
    batch_norm: bool = False
    algorithms: bool = False

    def __post_init__(self) -> None:
        check_fidelity(self.fidelity, self.lossy)

    def admits(self, plan: Plan, graph: SavedGraph) -> bool:
        """Whether all of a plan's moves are of the class; algorithms apart, which can be left out."""
        if FIDELITIES.index(plan.fidelity) > FIDELITIES.index(self.fidelity):
            return False
        return plan.sub_batches == 1 or self.part_counts(graph) != [1]

    def part_counts(self, graph: SavedGraph) -> list[int]:
        """Numbers of sub-batches to look at: 1, powers of two up to the most, and the most (the batch, if single rows
        go the same way)."""
        most = graph.most_parts
        if self.fidelity == "bitwise" or most < 2 or (trains_batch_norm(graph) and not self.batch_norm):
            return [1]
        return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})


@dataclass(frozen=True)
class Variant:
    """One way to treat a storage (``decision``), or a convolution's task (``choice``), or a segment, by number (-1:
    none runs anew). Where decision and segment are given, the storage comes back with that segment. ``delta``: what it
    adds, where that does not depend on other groups."""

    decision: Decision | None = None
    segment: int = -1
    choice: CallChoice | None = None
    delta: Delta | None = None


def of_storages(
    index: StepIndex, listed: Options, segments: Sequence[Candidate]
) -> tuple[list[Block], list[list[Variant]]]:
    """The groups of storages, each with its block: every form, and with every segment."""
    again = defaultdict(list)
    for number, candidate in enumerate(segments):
        for storage in candidate.storages:
            again[storage].append(Variant(candidate.decision(storage), segment=number))
    known = {s: decisions for s, decisions in listed.items() if s in index.by_storage}
    groups = [[*(Variant(d) for d in decisions), *again[s]] for s, decisions in known.items()]
    return [index.by_storage[s] for s in known], groups


def of_convolutions(index: StepIndex, costs: CostTable) -> list[list[Variant]]:
    """The groups of convolutions' tasks that have a choice of algorithms: the default, and those that no other beats or
    equals in both seconds and workspace."""
    calls = (c for c in index.graph.calls if c.covered >= 0 and c.op == "conv2d")
    groups = [_algorithms(index.graph, costs, t) for c in calls for t in index.of_call[c.index]]
    return [group for group in groups if len(group) > 1]


def _algorithms(graph: SavedGraph, costs: CostTable, task: int) -> list[Variant]:
    known, call, found = costs.algorithms[task], graph.calls[graph.tasks[task].call], [Variant(delta=Delta())]
    for number, a in enumerate(known):
        if any(_as_good(b, a) and (i < number or not _as_good(a, b)) for i, b in enumerate(known)):
            continue
        more, extra_s = a.workspace_bytes - known[0].workspace_bytes, a.seconds - known[0].seconds
        memory = tuple((t, n) for t, n in ((task, more), (task + 1, -more)) if n and t < len(graph.tasks))
        delta = Delta(memory, ((task, extra_s),) if extra_s else ())
        if delta != Delta():
            name = f"{graph.tasks[task].part_name}={a.name}"
            found.append(Variant(choice=CallChoice(call.covered, call.op, algorithm=name), delta=delta))
    return found


def _as_good(b: Algorithm, a: Algorithm) -> bool:
    return b.seconds <= a.seconds and b.workspace_bytes <= a.workspace_bytes
