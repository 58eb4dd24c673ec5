"""moDNN's task and data flow graph, memory demand, lower bound and sub-batch size.

Chen et al., DATE 2018, section II-2 and, with equations 1 to 3, section IV-A.

Tasks are those of the captured step. Weights always reside on the device, and so does an input batch that outlives the
step. Every other data block has *stays*: runs of tasks during which it must be on the device. Between two stays it may
be in host memory (:func:`plan_tdfg`; by the paper's own rule :mod:`bench.papers.modnn_devices`).

- (1) ``Mmin(t, b)`` = inputs + output + workspace of task t at sub-batch size b: :func:`demand_bytes`.
- (2) The lower bound: weights + max over t of Mmin(t, 1) without workspace: :func:`lower_bound`.
- (3) The sub-batch size, printed as "b = (M - S_W) / max Mmin(t, b)". That has a unit only if Mmin is bytes per sample,
  so :func:`sub_batch` iterates ``b_new = floor(b (M - S_W) / max_t Mmin(t, b))`` with the workspace of every task's
  fastest algorithm.

A sub-batch is one of equal parts, so b is the size of the largest of ``ceil(batch / b)`` parts; the caller's whole
input batch resides on the device. While weight gradients are summed over sub-batches all of them reside; in a whole
batch each is there from the task on that makes it. So a whole batch may need less memory than single samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from gistkit.errors import BudgetError
from gistkit.ir import Plan, SavedGraph, by_key, scaled, summed
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import check_fidelity, kept_by_ops, own_decisions
from gistkit.planning.simulate import Interval, Simulator, scaled_costs, trains_batch_norm


@dataclass(frozen=True)
class Data:
    """One data block: its stays (first task, last task) in order, and the tasks that write it. ``fresh``: criterion (b)
    keeps it on the device from its making to its next stay."""

    block: int
    nbytes: int
    stays: tuple[tuple[int, int], ...]
    writes: tuple[int, ...] = ()
    fresh: bool = False


@dataclass(frozen=True)
class TDFG:
    """The data of a step by number, the bytes that always reside, and by task what its operators make and free."""

    resident_bytes: int
    data: tuple[Data, ...]
    transient_bytes: tuple[int, ...]

    @cached_property
    def starting(self) -> dict[int, list[int]]:
        """By task the data of which a stay begins with it: those of its I(t) and O(t) that may be missing."""
        return by_key((first, number) for number, d in enumerate(self.data) for first, _ in d.stays)

    @cached_property
    def ending(self) -> dict[int, list[int]]:
        """By task the data of which a stay ends with it."""
        return by_key((last, number) for number, d in enumerate(self.data) for _, last in d.stays)

    @cached_property
    def written(self) -> dict[int, list[int]]:
        """By task the data that it writes."""
        return by_key((task, number) for number, d in enumerate(self.data) for task in d.writes)

    @cached_property
    def demand_bytes(self) -> tuple[int, ...]:
        """By task Mmin(t, b) of eq. (1) without workspace: inputs, output, and what its operators make and free."""
        tasks = len(self.transient_bytes)
        stays = ((first, last, data.nbytes) for data in self.data for first, last in data.stays)
        return tuple(map(sum, zip(self.transient_bytes, summed(stays, tasks), strict=True)))


Rule = Callable[[SavedGraph], TDFG]


@dataclass(frozen=True)
class Part:
    """A step in equal parts: how many, and of the largest its size, its graph and its costs."""

    parts: int
    size: int
    tdfg: TDFG
    costs: CostTable


def demand_bytes(part: Part, *, fastest: bool) -> int:
    """The greatest Mmin(t, b) of eq. (1), with the workspace of each task's fastest algorithm, or with the least."""
    costs, needs = part.costs, part.tdfg.demand_bytes
    names = costs.performance_optimal if fastest else costs.memory_optimal
    return max((need + costs.workspace_bytes(t, names(t)) for t, need in enumerate(needs)), default=0)


def lower_bound(part: Part) -> int:
    """Eq. (2) for the part's size: the paper's lower bound where that is 1."""
    return part.tdfg.resident_bytes + demand_bytes(part, fastest=False)


def next_size(part: Part, memory_bytes: int) -> int:
    """One round of eq. (3): at least 1."""
    return max(1, part.size * (memory_bytes - part.tdfg.resident_bytes) // max(1, demand_bytes(part, fastest=True)))


def sub_batch(at: Callable[[int], Part], batch: int, memory_bytes: int) -> Part:
    """Iterate eq. (3) from the whole batch until b converges; ``at(parts)`` is the step in so many parts. Where b comes
    back to an earlier size, the largest size of that cycle counts. A size that does not fit by eq. (2) gives way to the
    next smaller one that does, and where none does to the whole batch."""
    tried: list[int] = []
    parts = 1
    while parts not in tried:
        tried.append(parts)
        parts = -(-batch // min(batch, next_size(at(parts), memory_bytes)))
    candidates = (*splits(batch, min(tried[tried.index(parts) :]), batch), 1)
    return next(at(parts) for parts in candidates if lower_bound(at(parts)) <= memory_bytes)


def splits(batch: int, first: int, last: int) -> list[int]:
    """Numbers of parts from ``first`` to ``last``, one for each size of the largest part."""
    return [n for n in range(first, last + 1) if n == first or -(-batch // n) < -(-batch // (n - 1))]


def choose_sub_batch(
    graph: SavedGraph,
    costs: CostTable,
    memory_bytes: int,
    *,
    rule: Rule | None = None,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
) -> tuple[Part, dict[str, int]]:
    """Eq. (3) in ``memory_bytes``, ``reserve`` of them left free, or the whole batch where ``fidelity`` is "bitwise";
    and the least budget of each class of moves: ``bitwise`` is the whole batch, ``reassociated`` any number of parts.
    ``rule`` gives the data of a part, by default :func:`plan_tdfg`. Raises BudgetError below them, ValueError for
    another word or a graph without tasks."""
    check_fidelity(fidelity, None)
    at, most = parts_of(graph, costs, rule), most_parts(graph, batch_norm)
    least = {name: nbytes + reserve for name, nbytes in _least(at, most).items()}
    if least["bitwise" if fidelity == "bitwise" else "reassociated"] > memory_bytes:
        with_norms = _least(at, most_parts(graph, True))["reassociated"] + reserve
        raise BudgetError(memory_bytes, least, _remedy(memory_bytes, least["reassociated"], with_norms, fidelity))
    whole = fidelity == "bitwise" or most == 1
    return at(1) if whole else sub_batch(at, graph.batch, memory_bytes - reserve), least


def most_parts(graph: SavedGraph, batch_norm: bool) -> int:
    """The batch size, or 1 where single rows take another way through the model, or where a batch norm would see other
    statistics and ``batch_norm`` does not accept that."""
    alone = graph.least_rows == 1 and (batch_norm or not trains_batch_norm(graph))
    return max(graph.batch, 1) if alone else 1


def parts_of(graph: SavedGraph, costs: CostTable, rule: Rule | None = None) -> Callable[[int], Part]:
    """The step in any number of equal parts: profiled anew for every sub-batch size (Fig. 2)."""
    simulator, bare = Simulator(graph, costs), bare_plan(graph)
    stay = {d.storage for d in bare.decisions} | kept_by_ops(graph) | {-1}
    saved = (b for b in graph.blocks if b.saved >= 0 and b.uses and b.last < len(graph.tasks))
    movable = {b.id for b in saved if b.storage not in stay} if costs.hardware.has_link else set()

    @cache
    def at(parts: int) -> Part:
        seen, one = simulator.profile(replace(bare, sub_batches=parts)), scaled(graph, parts)
        table = costs if parts == 1 else scaled_costs(costs, graph, one)
        pairs = zip(table.algorithms, seen.extra_s, strict=True)  # what the runtime's own operators add
        slower = tuple(tuple(replace(a, seconds=a.seconds + extra_s) for a in known) for known, extra_s in pairs)
        tdfg = plan_tdfg(one, seen.intervals, movable) if rule is None else rule(one)
        return Part(parts, -(-max(graph.batch, 1) // parts), tdfg, replace(table, algorithms=slower))

    return at


def bare_plan(graph: SavedGraph) -> Plan:
    """What holds for every plan of moDNN: operators keep small maps by themselves."""
    return Plan("modnn", graph.fingerprint, own_decisions(graph), ())


def _least(at: Callable[[int], Part], most: int) -> dict[str, int]:
    whole = lower_bound(at(1))
    return {"bitwise": whole, "reassociated": min(whole, lower_bound(at(most)))}


def _remedy(memory_bytes: int, least_bytes: int, with_norms_bytes: int, fidelity: str) -> str:
    """What gives moDNN a plan: sub-batches need ``least_bytes``, or ``with_norms_bytes`` with batch norms cut."""
    if with_norms_bytes > memory_bytes:
        return "give it more memory, or take a smaller input or model: no size of sub-batches would do"
    ways = ['fidelity="reassociated"'] if fidelity == "bitwise" else []
    if least_bytes > memory_bytes:
        ways.append("per_sub_batch_norm=True (batch norms see parts of the batch)")
    return f"give it more memory, or allow sub-batches with {' and '.join(ways)}"


def plan_tdfg(graph: SavedGraph, intervals: Iterable[Interval], movable: Collection[int]) -> TDFG:
    """What gistkit's runtime can run: ``intervals`` are all that the step holds if nothing leaves; blocks in
    ``movable`` may leave once, between their last forward task and their first use in backward."""
    end, resident_bytes, data = len(graph.tasks), 0, []
    transient, written = [0] * end, written_by(graph)
    for interval in sorted((i for i in intervals if i.what != "workspace"), key=lambda i: i.block):
        first, last = max(interval.first, 0), min(interval.last, end)
        if interval.first < 0 and last == end:
            resident_bytes += interval.nbytes
        elif interval.block < 0 or interval.what == "scratch":
            for task in range(first, min(last, end - 1) + 1):
                transient[task] += interval.nbytes
        else:
            block, stays = graph.blocks[interval.block], ((first, last),)
            if block.id in movable:
                held, use = max(block.last, block.saved, first), block.uses[0].task
                stays = ((first, held), (use, last)) if use > held + 1 else stays
            data.append(Data(block.id, interval.nbytes, stays, tuple(written[block.id])))
    return TDFG(resident_bytes, tuple(data), tuple(transient))


def written_by(graph: SavedGraph) -> dict[int, list[int]]:
    """By block the tasks that make or write it."""
    made = [(b.id, b.first) for b in graph.blocks if b.first >= 0]
    return by_key([*made, *((block, t.index) for t in graph.tasks for block in t.writes)])
