"""From a choice of `optimal` to its plan, with a reason for every decision, and from a plan to the nearest choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from gistkit.errors import PlanError
from gistkit.ir import OPERATORS, RERUN, CallChoice, Decision, Plan
from gistkit.planning.cost import by_part, of_part
from gistkit.planning.forms import FIDELITIES
from gistkit.planning.policies.optimal.delta import Delta
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.variants import Variant, algorithm_of, bare

NO_PEAK = 2**62
"""The peak of what cannot run: above any budget."""
MIB = 2**20


def plan_of(problem: Problem, taken: Sequence[int]) -> Plan:
    """The plan of a choice, without figures and reasons."""
    variants = [problem.groups[g][v] for g, v in enumerate(taken)]
    chosen: dict[int, list[CallChoice]] = defaultdict(list)
    for choice in (*problem.choices, *(c for v in variants for c in _calls(problem, v))):
        chosen[choice.covered].append(choice)
    fidelity = max((v.fidelity for v in variants), key=FIDELITIES.index, default="bitwise")
    return replace(
        problem.bare,
        decisions=tuple(v.decision for v in variants if v.decision is not None),
        choices=tuple(_merged(problem, chosen[c]) for c in sorted(chosen)),
        fidelity="reassociated" if problem.parts > 1 and fidelity == "bitwise" else fidelity,
    )


def _calls(problem: Problem, variant: Variant) -> Iterator[CallChoice]:
    if variant.choice is not None:
        yield variant.choice
    for task, count in variant.slices:
        call = problem.graph.calls[problem.graph.tasks[task].call]
        yield CallChoice(call.covered, call.op, weight_grad_slices=count)


def _merged(problem: Problem, choices: Sequence[CallChoice]) -> CallChoice:
    """What several variants choose for one call, in one."""
    if len(choices) == 1:
        return choices[0]
    call = problem.index.covered[choices[0].covered].index
    parts = [problem.graph.tasks[t].part_name for t in problem.index.of_call[call]]
    algorithm = joined([c.algorithm for c in choices], parts)
    return replace(choices[0], weight_grad_slices=max(c.weight_grad_slices for c in choices), algorithm=algorithm)


def joined(algorithms: Sequence[str], parts: Sequence[str]) -> str:
    """The text for several algorithms of one call, each for a part of its own: one name where all ``parts`` of the call
    have the same."""
    text = ",".join(a for a in algorithms if a)
    names = {part: of_part(text, part) for part in parts}
    return by_part(names) if text and all(names.values()) else text


def clock(problem: Problem, taken: Sequence[int]) -> tuple[float, int]:
    """(seconds of one sub-batch, peak bytes) of a choice, by the simulator. Endless both where that refuses it."""
    try:
        run = problem.simulator.run(plan_of(problem, taken))
    except PlanError:
        return inf, NO_PEAK
    return run.step_s / problem.parts, run.peak_bytes


def choice_of(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """The variants nearest to a plan: the same forms, else kept as it is; its segments where all their storages that
    may come back are a candidate's."""
    decided = {d.storage: bare(d) for d in plan.decisions if d.form.returns != RERUN}
    algorithms = {c.covered: c.algorithm for c in plan.choices if c.algorithm}
    taken = []
    for group in problem.groups:
        first = group[0].decision
        if first is None:
            taken.append(algorithm_of(group, algorithms))
            continue
        wanted = decided.get(first.storage, Decision(first.storage, "dense"))
        taken.append(next((i for i, v in enumerate(group) if v.decision and bare(v.decision) == wanted), 0))
    returned: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for decision in plan.decisions:
        if decision.form.returns == RERUN:
            returned[decision.sources].add(decision.storage)
    able = {s for c in problem.segments for s in c.storages}
    for segment, candidate in enumerate(problem.segments, problem.first_segment):
        if returned.get(candidate.sources, set()) & able == set(candidate.storages):
            for group, variant in ((segment, 1), *problem.members[segment]):
                taken[group] = variant
    return tuple(taken)


def reasoned(problem: Problem, taken: Sequence[int]) -> Plan:
    """The plan of a choice, every decision with its reason: what it saves and what it costs."""
    plan = plan_of(problem, taken)
    reasons = [_reason(problem, g, v) for g, v in enumerate(taken[: problem.first_segment])]
    decisions = (replace(d, reason=r) for d, r in zip(plan.decisions, reasons, strict=True))
    return replace(plan, decisions=tuple(decisions))


def _reason(problem: Problem, group: int, number: int) -> str:
    variant = problem.groups[group][number]
    decision, home = variant.decision, problem.home[group]
    kept = problem.groups[group][home].decision
    assert decision is not None and kept is not None
    if decision.stays or decision.form.gone:
        return decision.reason or "kept: the budget allows it"
    if kept.codec != "dense" or number == home:
        return decision.reason
    delta, dense = (problem.least[problem.offsets[group] + v] for v in (number, home))
    saved, cost_s = _held(dense) - _held(delta), delta.seconds - dense.seconds
    how = decision.codec if decision.codec != "dense" else "raw bytes"
    if decision.on_host:
        how = f"{how} to the host, back from task {decision.prefetch}"
    elif decision.form.returns == OPERATORS:
        how = "rebuilt from what is kept"
    elif decision.form.returns == RERUN:
        return f"{decision.reason}: saves {saved / MIB:.1f} MiB"  # the seconds are the segment's
    cut = f" in {max(n for _, n in variant.slices)} slices" if variant.slices else ""
    price = f"for {cost_s * 1e3:.2f} ms" if cost_s > 5e-6 else "for nothing"
    return f"{how}{cut}: saves {saved / MIB:.1f} MiB {price}"


def _held(delta: Delta) -> int:
    """Bytes held between the two uses: the least from the first task of a life to its last."""
    level, levels = 0, []
    for _, nbytes in delta.memory:
        level += nbytes
        levels.append(level)
    return min(levels[:-1] if level == 0 else levels, default=0)
