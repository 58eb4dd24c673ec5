"""moDNN (Chen et al., DATE 2018): any budget down to a lower bound, by sub-batches, offloading and algorithms at once.

The pipeline of the paper's Fig. 2: the task and data flow graph, profiling and sub-batch size in turn until it
converges (:mod:`~gistkit.planning.policies.modnn.sub_batch`), the schedule of transfers and algorithms (Algorithm 1,
section IV-B, line by line), and in place of generated code a plan.

A plan moves what autograd saves, once each; gradient maps and whatever else has no stash stay on the device.
Sub-batches change the order of summation and, under batch norm in training mode, the statistics, of which the paper
says nothing: such a network is cut only where ``batch_norm`` accepts that.

docs/planner.md, "Policies", says what the paper leaves open and how it is settled here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from gistkit.ir import Decision, Plan, SavedGraph
from gistkit.planning.cost import Algorithm, CostTable
from gistkit.planning.forms import capacity, with_figures
from gistkit.planning.policies.convolutions import ConvAlgorithms
from gistkit.planning.policies.modnn.memory import WORKSPACE, Memory, MemoryMap, offload_delay_s
from gistkit.planning.policies.modnn.sub_batch import Part, bare_plan, choose_sub_batch


class Run(NamedTuple):
    """One task on StrmC: its algorithm, and all bytes that are allocated while it runs."""

    start_s: float
    finish_s: float
    algorithm: str
    memory_bytes: int


class Move(NamedTuple):
    """One transfer on StrmD, decided before ``task``; ``direction`` is d2h or h2d."""

    block: int
    nbytes: int
    direction: str
    task: int
    start_s: float
    finish_s: float


class Absence(NamedTuple):
    """A block's time in host memory: it has left before task ``release`` and has its memory again from ``prefetch``."""

    block: int
    release: int
    prefetch: int


def modnn(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
) -> Plan:
    """moDNN's plan within a budget (None: the device's memory), ``reserve`` bytes of which are left free. ``fidelity``
    "bitwise" allows no sub-batches, "lossy" no more than "reassociated"; ``batch_norm`` accepts them for a network
    whose batch norms then see other statistics. The plan's figures are the simulator's; those of moDNN's own clock are
    in ``details``. ``lower_bound_bytes`` is the least budget for the allowed class of moves. Raises BudgetError below
    that, with the least of each class; ValueError for another word or a graph without tasks."""
    memory_bytes = capacity(costs, budget_bytes)
    part, least = choose_sub_batch(
        graph, costs, memory_bytes, fidelity=fidelity, reserve=reserve, batch_norm=batch_norm
    )
    found = Schedule(part, memory_bytes - reserve)
    own_clock = {"own_step_s": found.step_s, "defragmentations": len(found.defragmented)}
    convolutions = ConvAlgorithms(graph, costs)
    reason, bare = "waits on the host between its two uses", bare_plan(graph)
    sent = (
        Decision(graph.blocks[block].storage, "dense", place="host", release=release, prefetch=prefetch, reason=reason)
        for block, release, prefetch in found.absences.values()
    )
    plan = replace(
        bare,
        decisions=(*bare.decisions, *sent),
        choices=convolutions.choices(convolutions.by_call([run.algorithm for run in found.runs])),
        details={"sub_batch": part.size, **own_clock},
        lower_bound_bytes=least["bitwise" if fidelity == "bitwise" else "reassociated"],
    )
    return in_parts(plan, graph, costs, budget_bytes, part.parts, reserve)


def in_parts(
    plan: Plan, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, parts: int, reserve: int
) -> Plan:
    """A plan of one sub-batch as the plan of the step: what one sub-batch keeps, the simulator's peak and seconds."""
    plan = replace(plan, sub_batches=parts, fidelity="reassociated" if parts > 1 else "bitwise")
    plan = with_figures(plan, graph, costs, budget_bytes, reserve=reserve)
    return replace(plan, details={**plan.details, "trainable": plan.peak_bytes <= capacity(costs, budget_bytes)})


class Schedule:
    """Algorithm 1: the static schedule of a step's part in ``memory_bytes``, at least ``lower_bound(part)``, in its own
    clock. ``now_s`` is T on StrmC, ``link_s`` when StrmD is free, ``ready_s`` when a block is there; ``defragmented``
    are the tasks before which memory was."""

    def __init__(self, part: Part, memory_bytes: int) -> None:
        self.part, self.tdfg, self.costs = part, part.tdfg, part.costs
        self.memory = Memory(part.tdfg, MemoryMap(memory_bytes - part.tdfg.resident_bytes))
        self.fastest_s = [min(a.seconds for a in known) for known in part.costs.algorithms]
        self.now_s = self.link_s = 0.0
        self.ready_s = [0.0] * len(part.tdfg.data)
        self.runs: list[Run] = []
        self.moves: list[Move] = []
        self.absences: dict[tuple[int, int], Absence] = {}  # by block and the task that needs it next
        self.defragmented: list[int] = []
        for t in range(len(part.tdfg.transient_bytes)):
            self.task(t)

    @property
    def step_s(self) -> float:
        return self.part.parts * self.runs[-1].finish_s

    def moved_bytes(self, direction: str) -> int:
        """Bytes of the whole step over the link in a direction, d2h or h2d."""
        return self.part.parts * sum(m.nbytes for m in self.moves if m.direction == direction)

    def task(self, t: int) -> None:
        self.prepare(t)
        algorithm = self.choose_algorithm(t)
        self.prefetch(t, algorithm.seconds)
        start_s, self.now_s = self.now_s, self.now_s + algorithm.seconds
        memory_bytes = self.tdfg.resident_bytes + self.memory.map.used_bytes
        self.runs.append(Run(start_s, self.now_s, algorithm.name, memory_bytes))
        for d in self.tdfg.written[t]:
            self.ready_s[d] = self.now_s
        self.memory.retire(t)

    def prepare(self, t: int) -> None:
        """Lines 3-8: allocate a task's inputs and outputs, load its inputs; T waits until all are there."""
        loads = self.memory.fetches(t)
        for key, nbytes in self.memory.missing(t):
            self.now_s = max(self.now_s, self.vacate(self.memory.scheme(nbytes, t, delay_s=self.delay_s), t))
            self.memory.enter(key, nbytes)
        for d, _ in loads:
            self.load(d, t, t)
        self.now_s = max(self.now_s, *(self.ready_s[d] for d in self.tdfg.starting[t]), 0.0)

    def choose_algorithm(self, t: int) -> Algorithm:
        """Lines 9-14: the algorithm of maximum gain, its workspace allocated; T becomes the start of the task."""
        base = min(self.costs.algorithms[t], key=lambda a: (a.workspace_bytes, a.seconds))
        possible = []
        for a in self.costs.algorithms[t]:
            scheme = self.memory.scheme(a.workspace_bytes, t, delay_s=self.delay_s)
            if scheme is not None:
                gain_s = base.seconds - a.seconds - self.delay_s(scheme) - self.delayed_prefetch_s(t, a, scheme)  # (5)
                possible.append((gain_s, a.seconds, -a.workspace_bytes, a, scheme))
        *_, chosen, scheme = max(possible, key=lambda p: p[:3], default=(base, None))
        self.now_s = max(self.now_s, self.vacate(scheme, t))
        if chosen.workspace_bytes:
            self.memory.enter(WORKSPACE, chosen.workspace_bytes)
        return chosen

    def delayed_prefetch_s(self, t: int, algorithm: Algorithm, scheme: Iterable[int]) -> float:
        """T_pre,alg(s) of eq. (5): transfer time of what s has to fetch now and only the workspace bars."""
        s = self.memory.next_fetch()
        if s is None or not algorithm.workspace_bytes or not self.is_time(t, s, algorithm.seconds):
            return 0.0
        beside, without = self.memory.copy(), self.memory.copy()
        for d in scheme:
            beside.leave(d)
        beside.enter(WORKSPACE, algorithm.workspace_bytes)
        fit = [{d for d, nbytes in self.memory.fetches(s) if m.force(d, nbytes, t, s)} for m in (without, beside)]
        return sum(self.costs.h2d_s(self.tdfg.data[d].nbytes) for d in fit[0] - fit[1])

    def prefetch(self, t: int, task_s: float) -> None:
        """Lines 15-27: fetch what future tasks need, the nearest first, as long as it is time and there is room."""
        while (s := self.memory.next_fetch()) is not None:
            if not self.is_time(t, s, task_s) or not self.memory.foresees(t, s):
                return
            for d, nbytes in self.memory.fetches(s):
                scheme = self.memory.scheme(nbytes, t, s, self.delay_s)
                if scheme is None:
                    return
                self.link_s = max(self.link_s, self.vacate(scheme, t))
                self.memory.enter(d, nbytes)
                self.load(d, t, s)

    def is_time(self, t: int, s: int, task_s: float) -> bool:
        """Line 19, eq. (4): whether a prefetch for task s that begins after task t would be late."""
        loads_s = sum(self.costs.h2d_s(nbytes) for _, nbytes in self.memory.fetches(s))
        expected_start_s = self.now_s + task_s + sum(self.fastest_s[t + 1 : s])
        return max(self.now_s + task_s, self.link_s) + loads_s > expected_start_s

    def delay_s(self, data: Iterable[int]) -> float:
        unsaved = [d for d in data if d not in self.memory.host]
        transfers = [(self.ready_s[d], self.costs.d2h_s(self.tdfg.data[d].nbytes)) for d in unsaved]
        return offload_delay_s(transfers, self.link_s, self.now_s)

    def transfer(self, d: int, direction: str, t: int, earliest_s: float) -> float:
        """The next transfer on StrmD; when it has finished."""
        data, start_s = self.tdfg.data[d], max(self.link_s, earliest_s)
        self.link_s = start_s + (self.costs.d2h_s if direction == "d2h" else self.costs.h2d_s)(data.nbytes)
        self.moves.append(Move(data.block, data.nbytes, direction, t, start_s, self.link_s))
        return self.link_s

    def load(self, d: int, t: int, s: int) -> None:
        self.ready_s[d] = self.transfer(d, "h2d", t, self.now_s)
        self.absences[d, s] = self.absences[d, s]._replace(prefetch=t)

    def vacate(self, scheme: Iterable[int] | None, t: int) -> float:
        """Line 5: offload a scheme before task t, or defragment where there is none; when the memory is free."""
        if scheme is None:
            self.defragmented.append(t)
            others = [d for d, s in self.memory.waiting.items() if s > t and d in self.memory.map]
            free_s, moved_bytes = max(self.now_s, self.vacate(others, t)), self.memory.map.defragment()
            return free_s + self.costs.copy_s(2 * moved_bytes) if moved_bytes else free_s
        free_s = 0.0
        for d in sorted(scheme, key=lambda d: self.ready_s[d]):
            fetched_s = self.ready_s[d]  # also where that was in vain
            saved = d in self.memory.host
            free_s = max(free_s, fetched_s if saved else self.transfer(d, "d2h", t, fetched_s))
            self.absences.setdefault((d, self.memory.waiting[d]), Absence(self.tdfg.data[d].block, t, -1))
            self.memory.leave(d)
        return free_s
