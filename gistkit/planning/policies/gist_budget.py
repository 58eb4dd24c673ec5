"""Gist's plans with their predicted peak and time, whole or by single encodings (Jain et al., ISCA 2018, Fig. 10, 17).

The allocators of the paper's figures (static sharing, the investigation baseline, dynamic) are views of the same plan.
*Optimised software* (section V-H) has no decoded buffer: backward reads an encoding piece by piece. Here that is batch
slices of the weight gradient, which are the ``reassociated`` class of moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gistkit.ir import OPERATORS, Block, CallChoice, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import held, make_plan
from gistkit.planning.policies.gist_rules import check_lossy, gist

BINARIZE, SSDC, DPR, REBUILD = "binarize", "ssdc", "dpr", "rebuild"
ENCODINGS = (BINARIZE, SSDC, DPR)
"""The paper's; ``rebuild`` goes beyond it."""


def gist_budget(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    lossy: str | None = None,
    encodings: Iterable[str] = (*ENCODINGS, REBUILD),
    slices: int = 1,
) -> Plan:
    """Gist's plan, lossless or with the given narrow format, with peak and seconds.

    ``encodings`` are those it may use; values are narrowed, inside sparse storage too, where ``dpr`` is among them.
    ``slices`` above 1 reads encoded inputs of weight gradients in that many batch slices (optimised software: the batch
    size). On a library's view a ReLU that a pool reads keeps its values, unless the view has pool maps
    (``library_view(maps=True)``). Raises ValueError for unknown words and fewer than one slice.
    """
    allowed = tuple(encodings)
    unknown = [e for e in allowed if e not in (*ENCODINGS, REBUILD)]
    if unknown:
        raise ValueError(
            f"encodings must be among {', '.join((*ENCODINGS, REBUILD))}; got {unknown[0]!r}: leave it out"
        )
    if slices < 1:
        raise ValueError(
            f"slices must be 1 (the whole batch at once) or more, got {slices}; the batch size is the most"
        )
    check_lossy(lossy)
    narrow_to = lossy if DPR in allowed else None
    found = gist(graph, lossy=narrow_to, densities=costs.densities, rebuild=REBUILD in allowed)
    blocks = {b.storage: b for b in held(graph) if b.storage >= 0}
    decisions = tuple(d for d in found.decisions if _holds(d, blocks.get(d.storage), allowed))
    choices = _choices(graph, found, decisions)
    if slices > 1:
        choices = _sliced(graph, decisions, choices, slices)
    narrow = any(d.form.rounds_to for d in decisions)
    cut = any(c.weight_grad_slices > 1 for c in choices)
    return make_plan(
        "gist",
        graph,
        costs,
        budget_bytes,
        decisions,
        choices,
        details={"lossy": lossy, "encodings": list(allowed), "slices": slices},
        fidelity="lossy" if narrow else "reassociated" if cut else "bitwise",
    )


def _encoding(decision: Decision) -> str | None:
    """Which of Gist's encodings a decision is; None for what keeps the tensor as it is."""
    form = decision.form
    if not form.values or form.made_by_op:
        return BINARIZE
    if form.sparse:
        return SSDC
    if form.returns == OPERATORS:
        return REBUILD
    return DPR if form.rounds_to else None


def _holds(decision: Decision, block: Block | None, allowed: tuple[str, ...]) -> bool:
    """Whether a decision may be taken: an encoding that is allowed, of a block that the step keeps, with values where
    its backward reads them."""
    encoding = _encoding(decision)
    if block is None or (encoding is not None and encoding not in allowed):
        return False
    return decision.form.values or decision.form.made_by_op or not any(u.values for u in block.uses)


def _choices(graph: SavedGraph, found: Plan, decisions: tuple[Decision, ...]) -> tuple[CallChoice, ...]:
    """Gist's choices for the decisions that are taken."""
    dropped = {d.storage for d in decisions if d.form.gone}
    calls = {c.covered: c for c in graph.calls if c.covered >= 0}
    taken = []
    for choice in found.choices:
        call = calls[choice.covered]
        carried = call.results if choice.op == "relu" else call.operands
        if graph.values[carried[0]].storage in dropped:
            taken.append(choice)
    return tuple(taken)


def _sliced(
    graph: SavedGraph, decisions: tuple[Decision, ...], choices: tuple[CallChoice, ...], slices: int
) -> tuple[CallChoice, ...]:
    """The choices, with slices for every covered convolution whose input is decoded for its backward.

    A linear's weight gradient is larger than its input: a second one to sum it up costs more than slices save.
    """
    coded = {d.storage for d in decisions if d.form.in_slices}
    by_call = {c.covered: c for c in choices}
    for call in graph.calls:
        if call.covered >= 0 and call.op == "conv2d":
            if any(s.storage in coded and s.field == "input" for s in call.saves):
                old = by_call.get(call.covered, CallChoice(call.covered, call.op))
                by_call[call.covered] = replace(old, weight_grad_slices=slices)
    return tuple(by_call[c] for c in sorted(by_call))
