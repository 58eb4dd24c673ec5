"""Why `optimal` decided so, in words for the report: what a decision saves and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gistkit.ir import Decision, Plan
from gistkit.planning.policies.optimal.attempt import Attempt
from gistkit.planning.policies.optimal.problem import Move

MIB = 2**20
_ALONE = ("dense", "drop")


def reasoned(attempt: Attempt, taken: Sequence[int]) -> Plan:
    """The plan of the moves taken, every decision with its reason."""
    reasons = {}
    for group, move in zip(attempt.problem.groups, taken, strict=True):
        decision = group[move].decision
        if decision is not None:
            reasons[decision.storage] = _reason(decision, group[move], group)
    plan = attempt.plan(taken)
    return replace(plan, decisions=tuple(replace(d, reason=reasons[d.storage]) for d in plan.decisions))


def _reason(decision: Decision, move: Move, group: Sequence[Move]) -> str:
    if decision.codec in _ALONE and decision.place == "device":
        return decision.reason or "kept: the budget allows it"
    dense = next((m for m in group if m.decision and (m.decision.codec, m.decision.place) == ("dense", "device")), None)
    if dense is None or dense is move:
        return decision.reason
    saved, cost_s = _held(dense) - _held(move), move.part.seconds - dense.part.seconds
    how = decision.codec if decision.codec != "dense" else "raw bytes"
    if decision.place == "host":
        how = f"{how} to the host, back from task {decision.prefetch}"
    elif decision.codec == "rebuild":
        how = "rebuilt from what is kept"
    elif decision.codec == "recompute":
        return f"{decision.reason}: saves {saved / MIB:.1f} MiB"  # the seconds are the segment's
    cut = f" in {move.slices} slices" if move.slices > 1 else ""
    price = f"for {cost_s * 1e3:.2f} ms" if cost_s > 5e-6 else "for nothing"
    return f"{how}{cut}: saves {saved / MIB:.1f} MiB {price}"


def _held(move: Move) -> float:
    """Bytes held between the two uses: the least during any task of its life."""
    first = min((f for f, _, _ in move.part.memory), default=0)
    last = max((e for _, e, _ in move.part.memory), default=0)
    steps = sorted({first, *(e + 1 for _, e, _ in move.part.memory), *(f for f, _, _ in move.part.memory)})
    levels = [sum(n for f, e, n in move.part.memory if f <= t <= e) for t in steps if t <= last]
    return float(min(levels, default=0))
