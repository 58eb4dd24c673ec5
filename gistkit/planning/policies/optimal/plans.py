"""From a choice of `optimal` to its plan: with a reason for every decision, with transfers at other moments."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from gistkit.errors import PlanError
from gistkit.ir import OPERATORS, RERUN, Decision, Plan
from gistkit.planning.forms import kept_bytes
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.simulate import load_of

NO_PEAK = 2**62  # the peak of what cannot run: above any budget
MIB = 2**20


def plan_of(problem: Problem, taken: Sequence[int]) -> Plan:
    """The plan of a choice, without figures and reasons."""
    variants = [problem.groups[g][v] for g, v in enumerate(taken)]
    decisions = tuple(v.decision for v in variants if v.decision is not None)
    summed = "reassociated" if problem.parts > 1 else "bitwise"
    lossy = any(d.form.rounds_to for d in decisions)
    return replace(problem.bare, decisions=decisions, fidelity="lossy" if lossy else summed)


def clock(problem: Problem, taken: Sequence[int]) -> tuple[float, int]:
    """(seconds of one sub-batch, peak bytes) of a choice, by the simulator; equal steps by their compute
    (``Problem.idle``). Endless both where that refuses it."""
    try:
        run = problem.simulator.run(plan_of(problem, taken))
    except PlanError:
        return inf, NO_PEAK
    return (run.step_s + problem.idle * (run.compute_s + run.extra_s)) / problem.parts, run.peak_bytes


def reasoned(problem: Problem, taken: Sequence[int]) -> Plan:
    """The plan of a choice, every decision with its reason: what it saves and what it costs."""
    plan = plan_of(problem, taken)
    reasons = [_reason(problem, g, v) for g, v in enumerate(taken[: problem.first_segment])]
    decisions = (replace(d, reason=r) for d, r in zip(plan.decisions, reasons, strict=True))
    return replace(plan, decisions=tuple(decisions))


def _reason(problem: Problem, group: int, number: int) -> str:
    decision, home = problem.groups[group][number].decision, problem.home[group]
    assert decision is not None
    if decision.stays or decision.form.gone or number == home:
        return decision.reason or "kept: the budget allows it"
    block = problem.blocks[group]
    saves = f"saves {(block.nbytes - kept_bytes(block, decision, problem.costs)) / MIB:.1f} MiB"
    if decision.form.returns == RERUN:
        return f"{decision.reason}: {saves}"  # the seconds are the segment's
    how = decision.codec if decision.codec != "dense" else "raw bytes"
    if decision.on_host:
        how = f"{how} to the host, back from task {decision.prefetch}"
    elif decision.form.returns == OPERATORS:
        how = "rebuilt from what is kept"
    delta, kept = (problem.least[problem.offsets[group] + v] for v in (number, home))
    cost_s = delta.seconds - kept.seconds
    return f"{how}: {saves} for {f'{cost_s * 1e3:.2f} ms' if cost_s > 5e-6 else 'nothing'}"


def retimed(problem: Problem, taken: Sequence[int]) -> Iterator[Decision]:
    """What a choice ships at the moments at which the link really has time: let go of as soon as the link is done with
    it and what was before it, fetched when it and what is after it must be, or both."""
    plan = plan_of(problem, taken)
    transfers, start_s = problem.simulator.profile(plan).transfers, problem.simulator.run(plan).start_s
    left: dict[int, int] = {}
    fetched: dict[int, int] = {}
    free, latest = 0.0, inf
    for t in (t for t in transfers if t.direction == "d2h"):
        free = max(free, start_s[min(t.issue, len(start_s) - 1)]) + load_of(t, problem.costs)[3]
        left[t.storage] = max(bisect_left(start_s, free), t.issue + 1)
    for t in sorted((t for t in transfers if t.direction == "h2d"), key=lambda t: (-t.due, -t.issue)):
        latest = min(latest, start_s[t.due]) - load_of(t, problem.costs)[3]
        fetched[t.storage] = max(0, min(bisect_right(start_s, latest) - 1, t.due))
    for d in plan.decisions:
        if d.on_host and d.storage in left and d.storage in fetched:
            release, prefetch = left[d.storage], fetched[d.storage]
            for begin, end in ((release, prefetch), (release, d.prefetch), (d.release, prefetch)):
                if begin <= end:
                    yield replace(d, release=begin, prefetch=end)
