"""What may be chosen: for every kept storage its forms, for a convolution's task its algorithm, segments on and off.

Each is a *group*; a plan takes one *variant* of every group. The forms are those of
:func:`gistkit.planning.forms.options`. A storage's form that comes back with a segment goes with the segment's
group: both are taken or neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from gistkit.ir import FORMS, Block, CallChoice, Decision, SavedGraph
from gistkit.planning.cost import Algorithm, CostTable, is_switched, of_part
from gistkit.planning.forms import slice_counts
from gistkit.planning.policies.optimal.delta import NO_DELTA, Delta
from gistkit.planning.policies.optimal.segments import Candidate
from gistkit.planning.simulate import StepIndex

Options = Mapping[int, Sequence[Decision]]


@dataclass(frozen=True)
class Variant:
    """One way to treat a storage (``decision``; the weight gradients that read it run in ``slices``, by task), or a
    convolution's task (``choice``, which adds ``delta``), or a segment, by number (-1: none runs anew). Where both are
    given, the storage comes back with that segment."""

    decision: Decision | None = None
    slices: tuple[tuple[int, int], ...] = ()
    choice: CallChoice | None = None
    delta: Delta = NO_DELTA
    segment: int = -1

    @property
    def fidelity(self) -> str:
        """The class of moves that it is of."""
        return fidelity_of(self.decision.codec if self.decision else "", self.choice, bool(self.slices))


@cache
def fidelity_of(codec: str, choice: CallChoice | None = None, sliced: bool = False) -> str:
    """The class of moves of a form, an algorithm, slices."""
    if codec and FORMS[codec].rounds_to:
        return "lossy"
    switched = choice is not None and is_switched(choice.algorithm)
    return "reassociated" if switched or sliced else "bitwise"


def bare(decision: Decision) -> Decision:
    """A decision without its reason."""
    return replace(decision, reason="")


def of_storages(
    index: StepIndex, listed: Options, segments: Sequence[Candidate], fidelity: str
) -> tuple[list[Block], list[tuple[Variant, ...]]]:
    """The groups of storages, each with its block: every form, whole and in slices, and with every segment."""
    again = defaultdict(list)
    for number, candidate in enumerate(segments):
        for storage in candidate.storages:
            again[storage].append(Variant(candidate.decision(storage), segment=number))
    counts, blocks, groups = slice_counts(fidelity, len(listed)), [], []
    for storage, decisions in listed.items():
        block = index.by_storage.get(storage)
        if block is not None:
            blocks.append(block)
            forms = [Variant(d, cut) for d in decisions for cut in _cuts(index.graph, block, d, counts)]
            groups.append((*forms, *again[storage]))
    return blocks, groups


def _cuts(graph: SavedGraph, block: Block, decision: Decision, counts: Sequence[int]) -> list[tuple]:
    """The slices, by task, in which the weight gradients that read a storage may run."""
    tasks = [u.task for u in block.uses if u.values and _may_be_cut(graph, u.task)]
    if not decision.form.in_slices or not tasks:
        return [()]
    return [tuple((t, n) for t in tasks) if n > 1 else () for n in counts if n == 1 or n <= graph.batch]


def _may_be_cut(graph: SavedGraph, task: int) -> bool:
    return graph.tasks[task].part == "weight" and graph.calls[graph.tasks[task].call].covered >= 0


def of_convolutions(index: StepIndex, costs: CostTable) -> list[tuple[Variant, ...]]:
    """The groups of convolutions' tasks that have a choice of algorithms: the default, and those that no other beats or
    equals in both seconds and workspace."""
    calls = (c for c in index.graph.calls if c.covered >= 0 and c.op == "conv2d")
    groups = [_algorithms(index.graph, costs, t) for c in calls for t in index.of_call[c.index]]
    return [group for group in groups if len(group) > 1]


def _algorithms(graph: SavedGraph, costs: CostTable, task: int) -> tuple[Variant, ...]:
    known, call = costs.algorithms[task], graph.calls[graph.tasks[task].call]
    found = [Variant()]
    for number, a in enumerate(known):
        if any(_as_good(b, a) and (i < number or not _as_good(a, b)) for i, b in enumerate(known)):
            continue
        more, extra_s = a.workspace_bytes - known[0].workspace_bytes, a.seconds - known[0].seconds
        memory = tuple((t, n) for t, n in ((task, more), (task + 1, -more)) if n and t < len(graph.tasks))
        delta = Delta(memory, ((task, extra_s),) if extra_s else ())
        if delta != NO_DELTA:
            name = f"{graph.tasks[task].part_name}={a.name}"
            found.append(Variant(choice=CallChoice(call.covered, call.op, algorithm=name), delta=delta))
    return tuple(found)


def _as_good(b: Algorithm, a: Algorithm) -> bool:
    return b.seconds <= a.seconds and b.workspace_bytes <= a.workspace_bytes


def algorithm_of(group: Sequence[Variant], algorithms: Mapping[int, str]) -> int:
    """The variant of a convolution's group that a plan takes whose calls run under ``algorithms``, by covered call; the
    default where it takes one that no variant stands for."""
    for number, choice in enumerate(v.choice for v in group):
        if choice is not None:
            part, _, name = choice.algorithm.partition("=")
            if of_part(algorithms.get(choice.covered, ""), part) == name:
                return number
    return 0
