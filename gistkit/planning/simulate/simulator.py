"""What a whole plan does, and the clock over it (docs/planner.md has its rules): bytes, seconds, delays, task by task.

Effects are additive: memory by interval, extra seconds by task, transfers. Memory during a task is the sum of the
intervals that hold it: it follows from the plan alone, not from the clock. One compute stream runs the tasks in order
as the host issues them (``Hardware.host_s``, ``runtime_host_s``), and the link has a queue for each direction. Between
two sub-batches the host is not ahead of the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gistkit.errors import PlanError
from gistkit.ir import BACKWARD, BEFORE, LIBRARY, STAY, Block, CallChoice, Decision, Plan, SavedGraph, scaled, summed
from gistkit.planning.cost import Algorithm, CostTable, cost_table, of_part
from gistkit.planning.simulate.block_effects import block_effects
from gistkit.planning.simulate.context import Context, by_pytorch
from gistkit.planning.simulate.intervals import Beside, Effects, Interval, Transfer, delays, load_of
from gistkit.planning.simulate.step_index import StepIndex

LOSS_BYTES = 16
"""The sum of the sub-batches' losses, and a sub-batch's weighted share of it."""


@dataclass(frozen=True)
class Profile:
    """A step, or one of its sub-batches, under a plan: the number of tasks, all intervals, seconds by task (``task_s``
    by themselves, ``extra_s`` what the plan adds), transfers in the order of issue, what host and link do to tasks."""

    tasks: int
    intervals: tuple[Interval, ...]
    extra_s: tuple[float, ...]
    task_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    beside: Beside


@dataclass(frozen=True)
class Simulation:
    """What a step holds and takes. ``memory_bytes`` by task, the reserve in it; ``peak_bytes`` their maximum, first
    reached at ``peak_task``. ``step_s`` is compute (``compute_s``), what the plan adds to it (``extra_s``), and waiting
    for link and host with what transfers slow (``stall_s``). Seconds and bytes on the link are those of all
    sub-batches; ``memory_bytes`` and ``start_s``, by task, those of one."""

    peak_bytes: int
    peak_task: int
    memory_bytes: tuple[int, ...]
    step_s: float
    compute_s: float
    extra_s: float
    stall_s: float
    d2h_bytes: int
    h2d_bytes: int
    start_s: tuple[float, ...]


class Simulator:
    """One graph on one device, taken apart once for many plans; PlanError for a graph without tasks."""

    def __init__(self, graph: SavedGraph, costs: CostTable, *, accumulates: bool = False) -> None:
        self.graph, self.costs, self.index = graph, costs, StepIndex(graph)
        self.task_s = tuple(costs.task_s(t.index) for t in graph.tasks)
        self._slowed = np.array([costs.slowed(t) for t in graph.tasks])
        sizes = ((t.index, costs.workspace_bytes(t.index)) for t in graph.tasks)
        self._workspace = {task: nbytes for task, nbytes in sizes if nbytes}
        self._choosable = [b for b in graph.blocks if b.kind in ("activation", "input")]
        self._fixed = tuple(self._fixed_intervals(accumulates))
        plain = (t for t in graph.tasks if t.plain_bytes)
        self._plain = tuple(Interval(t.index, t.index, t.plain_bytes, -1, "transient") for t in plain)
        self._masks = tuple(self._held_masks())
        self._parts: dict[int, Simulator] = {}
        self._memory: dict[tuple, Effects] = {}

    def part(self, parts: int) -> Simulator:
        """The composer of one of ``parts`` sub-batches; itself for 1."""
        if parts != 1 and parts not in self._parts:
            small = scaled(self.graph, parts)
            self._parts[parts] = Simulator(small, scaled_costs(self.costs, self.graph, small), accumulates=True)
        return self if parts == 1 else self._parts[parts]

    def profile(self, plan: Plan) -> Profile:
        """The step under a plan. Raises PlanError for decisions that make no sense, each named."""
        return self.part(plan.sub_batches)._profile(plan)

    def run(self, plan: Plan, *, reserve: int = 0) -> Simulation:
        """The step under a plan, ``reserve`` bytes being there all the time. Raises PlanError as :meth:`profile`."""
        composed = self.profile(plan)
        memory = memory_bytes(composed.intervals, composed.tasks, reserve)
        busy_s = np.array(composed.task_s) + composed.extra_s
        loads = [load_of(t, self.costs) for t in composed.transfers]
        late_s = delays(busy_s, loads, self.costs.hardware.shared_rate, composed.beside)
        starts = np.cumsum(busy_s) - busy_s + late_s[:-1]
        out, back = (sum(t.nbytes for t in composed.transfers if t.direction == d) for d in ("d2h", "h2d"))
        times, peak, stall_s = plan.sub_batches, max(memory), float(late_s[-1])
        compute_s, extra_s = sum(composed.task_s), sum(composed.extra_s)
        return Simulation(
            peak_bytes=peak,
            peak_task=memory.index(peak),
            memory_bytes=tuple(memory),
            step_s=times * (compute_s + extra_s + stall_s),
            compute_s=times * compute_s,
            extra_s=times * extra_s,
            stall_s=times * stall_s,
            d2h_bytes=times * out,
            h2d_bytes=times * back,
            start_s=tuple(starts.tolist()),
        )

    def _profile(self, plan: Plan) -> Profile:
        context = Context.of(plan, self.index)
        task_s, algorithms = self._seconds(plan)
        extra, issued = [0.0] * len(task_s), np.ones(len(task_s))
        passed, casts = self._passed(plan), self._casts_anew(context) if plan.modules else {}
        intervals = [i for i in self._fixed if i.block not in passed and i.block not in casts]
        intervals += (i for lives in casts.values() for i in lives)
        transfers: list[Transfer] = []
        parts = [self._of_block(b, d, context) for b, d in self._decided(plan)]
        factor, whole = self.costs.hardware.move_host_factor, bool(plan.modules)
        parts += [s.effects(task_s, factor, whole) for s in context.segments]
        parts += [self._of_passed(b, t) for b, t in passed.items()]
        for part in parts:
            intervals += part.intervals
            transfers += part.transfers
            for task, seconds in part.extra_s:
                extra[task] += seconds
            for task, count in part.issued:
                issued[task] += count
        intervals += (
            *self._workspaces(algorithms, by_pytorch(plan) and self.graph.source != LIBRARY, context),
            *(self._plain if context.plain else ()),
            *(self._masks if context.segments else ()),
            *self._joint(plan),
        )
        transfers.sort(key=lambda t: (t.issue, t.due))
        host = self.costs.hardware
        beside = Beside((host.host_s if context.plain else host.runtime_host_s) * issued, self._slowed)
        return Profile(len(task_s), tuple(intervals), tuple(extra), tuple(task_s), tuple(transfers), beside)

    def _decided(self, plan: Plan) -> Iterator[tuple[Block, Decision | None]]:
        decisions = {self.index.block(d.storage).id: d for d in plan.decisions}
        for block in self._choosable:
            yield block, decisions.pop(block.id, None)
        for block, decision in decisions.items():
            yield self.graph.blocks[block], decision

    def _of_block(self, block: Block, decision: Decision | None, context: Context) -> Effects:
        also = context.also.get(block.id)
        key = (block.id, decision, context.plain, also)
        if decision is not None and decision.form.returns != STAY:
            late = context.scratch_end(block.saved) if self.costs.hardware.async_counts else None
            key += (late, context.restart.get(block.id), context.decoded_for_segment.get(block.id))
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = block_effects(self.graph, self.costs, decision, block, context)
        return found

    def _passed(self, plan: Plan) -> dict[int, int]:
        """Gradients, by block with the task, that ReLUs whose mask a pool's map carries hand on as they are."""
        found = {}
        for choice in (c for c in plan.choices if c.mask_in_pool and c.op == "relu"):
            for task in self.index.backward_of(choice.covered):
                written = (self.graph.blocks[b] for b in self.graph.tasks[task].writes)
                found |= {b.id: task for b in written if b.kind == "gradient" and b.first == task}
        return found

    def _of_passed(self, block: int, task: int) -> Effects:
        """The gradient takes over the memory of the one that came in: nothing of its own during the ReLU's task."""
        b = self.graph.blocks[block]
        lives = (Interval(task + 1, b.last, b.nbytes, block, "gradient"),) if b.last > task else ()
        return Effects(lives, ((task, -self.task_s[task]),))

    def _casts_anew(self, context: Context) -> dict[int, tuple[Interval, ...]]:
        """Autocast's copies of weights that modules which run anew make and no other call saves, by block: they go with
        the context of autocast, behind the loss, and are there again from the rerun on."""
        graph, found = self.graph, {}
        end = next((t.index for t in graph.tasks if t.phase == BACKWARD), len(graph.tasks)) - 1
        for segment in context.segments:
            calls = {graph.tasks[t].call for t in segment.tasks}
            for block in (graph.blocks[b] for t in segment.tasks for b in graph.tasks[t].writes):
                savers = {call.index for call, _ in graph.savers(block.storage)} if block.kind == "weight" else set()
                if savers and savers <= calls and block.last >= segment.start:
                    lives = (block.first, end), (segment.start, block.last)
                    found[block.id] = tuple(Interval(a, b, block.nbytes, block.id, "static") for a, b in lives)
        return found

    def _joint(self, plan: Plan) -> Iterator[Interval]:
        """What calls whose node takes both gradients at once hold besides."""
        for choice in (c for c in plan.choices if c.joint):
            for task, nbytes in self.index.joint_bytes(choice.covered).items():
                yield Interval(task, task, nbytes, -1, "decoded")

    def _seconds(self, plan: Plan) -> tuple[list[float], dict[int, str]]:
        algorithms: dict[int, str] = {}
        for choice in (c for c in plan.choices if c.algorithm):
            algorithms |= self._of_call(choice)
        seconds = list(self.task_s)
        for task, name in algorithms.items():
            seconds[task] = self.costs.task_s(task, name)
        return seconds, algorithms

    def _of_call(self, choice: CallChoice) -> dict[int, str]:
        """The algorithms, by task, that a choice names for its call; PlanError where no task has one."""
        call = self.index.covered[choice.covered].index
        known = {t: {a.name for a in self.costs.algorithms[t]} for t in self.index.of_call[call]}
        wanted = {t: of_part(choice.algorithm, self.graph.tasks[t].part_name) for t in known}
        found = {t: name for t, name in wanted.items() if name in known[t]}
        if not found:
            raise PlanError(
                f"choice for covered call {choice.covered} ({choice.op}): no algorithm {choice.algorithm!r}; there "
                f"are {', '.join(sorted(set().union(*known.values())))}; take one of these or leave it ''"
            )
        return found

    def _workspaces(self, algorithms: dict[int, str], plain: bool, context: Context) -> Iterator[Interval]:
        """Under ``plain`` PyTorch's node takes a convolution's input gradient first, and the other one beside it. Where
        algorithms are named the task before which a segment runs anew has no longer the workspace of the rerun."""
        sizes = self._workspace | {t: self.costs.workspace_bytes(t, name) for t, name in algorithms.items()}
        for weight, task in pairwise(self.graph.tasks if plain else ()):
            if task.conv is not None and (weight.part, task.part) == ("weight", "input") and weight.call == task.call:
                sizes[task.index] = max(sizes.get(t.index, 0) for t in (weight, task))
        for segment in context.segments if algorithms else ():
            sizes[segment.start] = max(sizes.get(t, 0) for t in (segment.start, *segment.tasks))
        for task, nbytes in sizes.items():
            if nbytes:
                yield Interval(task, task, nbytes, -1, "workspace")

    def _fixed_intervals(self, accumulates: bool) -> Iterator[Interval]:
        """What no decision changes: what the libraries hold among it. Where gradients accumulate over sub-batches,
        those of the parameters are there from the second one's start (:func:`_passing`)."""
        if self.costs.hardware.libraries_bytes:
            yield Interval(BEFORE, len(self.graph.tasks), self.costs.hardware.libraries_bytes, -1, "libraries")
        for block in self.graph.blocks:
            if block.kind in ("activation", "input"):
                continue
            what = "static" if block.kind in ("weight", "buffer") else "gradient"
            first = BEFORE if accumulates and block.kind == "weight_gradient" else block.first
            yield Interval(first, block.last, block.nbytes, block.id, what)
        if accumulates:
            for start, last, nbytes in _passing(self.graph):
                yield Interval(start, last, nbytes, -1, "transient")
        for task in self.graph.tasks:
            if task.transient_bytes:
                yield Interval(task.index, task.index, task.transient_bytes, -1, "transient")

    def _held_masks(self) -> Iterator[Interval]:
        """Where the model makes masks by other calls than in its capture, as it may where rows are padded, the runtime
        holds them until the segment that reads them runs anew."""
        end = len(self.graph.tasks) - 1
        for block in (self.index.by_storage[s] for s in sorted(self.graph.masks) if s in self.index.by_storage):
            if block.last < end:
                yield Interval(block.last + 1, end, block.nbytes, block.id, "mask")


def simulate(graph: SavedGraph, plan: Plan, costs: CostTable, *, reserve: int = 0) -> Simulation:
    """Simulate one step. ``reserve`` bytes are there all the time. :class:`Simulator` is this for many plans. Raises
    PlanError (a ValueError) for a graph without tasks and for decisions that make no sense."""
    return Simulator(graph, costs).run(plan, reserve=reserve)


def memory_bytes(intervals: Iterable[Interval], tasks: int, reserve: int = 0) -> list[int]:
    """The sum of the intervals during every task, plus ``reserve``."""
    lives = ((first, last, nbytes) for first, last, nbytes, _, _ in intervals)
    return [reserve + nbytes for nbytes in summed(lives, tasks)]


def check_per_sub_batch_norm(caller: str, accepted: object) -> None:
    """Raise TypeError, in the name of ``caller``, for anything but True and False."""
    if not isinstance(accepted, bool):
        raise TypeError(
            f"{caller}: per_sub_batch_norm must be True or False, got {accepted!r}; False refuses batch norms that "
            "would see other statistics"
        )


def trains_batch_norm(graph: SavedGraph) -> bool:
    """Whether the statistics of a batch norm in training mode depend on which rows are taken together."""
    norms = (c for c in graph.calls if c.op == "batch_norm")
    backward = any(t.phase == BACKWARD and "BatchNorm" in t.op for t in graph.tasks)
    return backward or any((c.options or {}).get("training", True) for c in norms)


def _passing(graph: SavedGraph) -> Iterator[tuple[int, int, int]]:
    """(first task, last task, bytes) of what is there in passing because gradients are summed over sub-batches: each
    new weight gradient beside its sum, until its node has ended; the losses."""
    tasks = graph.tasks
    yield 0, len(tasks) - 1, LOSS_BYTES
    for block in graph.blocks:
        if block.kind == "weight_gradient" and block.first >= 0 and tasks[block.first].op != "accumulate":
            last, after = block.first, block.first + 1
            if tasks[last].part == "weight" and after < len(tasks) and tasks[after].call == tasks[last].call:
                last += tasks[after].part == "input"
            yield block.first, last, block.nbytes


def scaled_costs(costs: CostTable, graph: SavedGraph, part: SavedGraph) -> CostTable:
    """The costs of ``part``, one of a graph's sub-batches (:func:`gistkit.ir.scaled`). A task's seconds keep their
    ratio to what the roofline says of it, so measured seconds carry over; measured workspace grows with the rows. Of
    engines those without workspace are left: copies of filters in that of the others do not shrink with the rows."""
    costs = costs.without_engines(0)
    same = {"density": dict(costs.densities), "ways": costs.ways}
    whole, small = (cost_table(g, costs.hardware, **same) for g in (graph, part))
    tables = zip(costs.algorithms, whole.algorithms, small.algorithms, strict=True)
    rows = part.batch, max(graph.batch, 1)
    return replace(costs, algorithms=tuple(_scaled(*table, *rows) for table in tables))


def _scaled(
    given: tuple[Algorithm, ...], whole: tuple[Algorithm, ...], small: tuple[Algorithm, ...], rows: int, batch: int
) -> tuple[Algorithm, ...]:
    by_rates = {a.name: a for a in whole}
    known = {a.name: a for a in small}
    out = []
    for algorithm in given:
        like, base = known.get(algorithm.name, small[0]), by_rates.get(algorithm.name, whole[0])
        ratio = algorithm.seconds / base.seconds if base.seconds else 1.0
        measured = algorithm.workspace_bytes != base.workspace_bytes
        nbytes = -(-algorithm.workspace_bytes * rows // batch) if measured else like.workspace_bytes
        out.append(Algorithm(algorithm.name, like.seconds * ratio, nbytes))
    return tuple(out)
