"""The sums of `optimal` as a relaxation: no task holds more, no step computes longer than the simulator says, whatever
is chosen. Bounds are made of them (``Plan.lower_bound_bytes``, ``Plan.gap``), so bounds are true."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.attempt import Attempt
from gistkit.planning.policies.optimal.joints import joints_of
from gistkit.planning.policies.optimal.optimal import minimise_peak, optimal
from gistkit.planning.policies.optimal.problem import Part, spread
from gistkit.planning.simulate.context import Context
from gistkit.planning.simulate.simulator import Simulator
from tests.planning.policies.test_optimal import CPU, CUDA, LINKED
from tests.support.step_graphs import Step, chain, forked, step_graphs

CLASSES = (("bitwise", None), ("reassociated", None), ("lossy", "fp8"))
SEEDS = st.integers(0, 2**20)
ROUNDING = 1e-9
"""Of sums of some hundred seconds of double precision, relative."""


def skips(relus=True):
    """Maps that are read again further on, beside others that nothing comes of: what runs anew starts from up to three
    of them. Without ``relus``, which must not come back from rounded values, sums."""
    step = Step(2)
    act = step.relu if relus else lambda x: step.add(x, x)
    x = step.conv(step.input(3, 32, 32), 8)
    step.add(step.add(x, x), x)
    y = step.batch_norm(x)
    step.conv(y, 8)
    z = act(y)
    a = step.conv(z, 8)
    b = step.conv(step.add(z, a), 8)
    c = step.batch_norm(step.add(b, a))
    step.batch_norm(c)
    d = act(c)
    step.conv(act(c), 8)
    e = step.batch_norm(d)
    return step.finish(step.add(step.batch_norm(e), e))


def attempt_of(graph, device, fidelity, lossy, parts=1):
    costs = cost_table(graph, device)
    simulator = Simulator(graph, costs)
    return Attempt(graph, costs, simulator, fidelity, lossy, parts=parts, algorithms=False), simulator


def choices(problem, draw, count) -> Iterator[list[int]]:
    """Allowed choices, most of them with rebuilds or encodings wherever there are some, and with segments on."""
    tied = {key for tie in problem.ties for key in tie.members}
    for _ in range(count):
        liked = draw.choice(("rebuild", "zvc", "fp8", "dense"))
        taken = []
        for g, group in enumerate(problem.groups):
            free = [m for m in range(len(group)) if (g, m) not in tied]
            found = [m for m in free if group[m].decision and liked in group[m].decision.codec]
            taken.append(
                0 if group[0].decision is None else draw.choice(found if found and draw.random() < 0.8 else free)
            )
        for tie in draw.sample(problem.ties, draw.randint(0, len(problem.ties))):
            on = dict((tie.on, *tie.members))
            if problem.allowed(changed := [on.get(g, m) for g, m in enumerate(taken)]):
                taken = changed
        if problem.allowed(taken):
            yield taken


def differences(attempt, simulator, taken):
    """(bytes by task, seconds) by which the problem is above the simulator, the latter relative."""
    problem, run = attempt.problem, simulator.run(attempt.plan(taken))
    parts = list(problem.parts(taken))
    seconds = attempt.parts * (float(problem.base_s.sum()) + sum(part.seconds for part in parts))
    over = spread(parts, problem.base_bytes) - np.array(run.memory_bytes)
    return over, seconds / (run.compute_s + run.extra_s) - 1


OWN = st.sampled_from((skips(), chain(8, 8, 32, 4)))
"""A chain has so many encodings that they settle each other's scratches on CUDA."""


@pytest.mark.parametrize("device", [CPU, LINKED, CUDA], ids=["cpu", "link", "cuda"])
@settings(deadline=None, max_examples=10, derandomize=True)
@given(graph=st.one_of(step_graphs(12, size=64, grown=True), OWN), words=st.sampled_from(CLASSES), seed=SEEDS)
def test_no_sum_is_above_the_simulator(device, graph, words, seed):
    for parts in (1, 2) if graph.batch > 1 and words[0] != "bitwise" else (1,):
        attempt, simulator = attempt_of(graph, device, *words, parts=parts)
        problem = attempt.problem
        for taken in choices(problem, random.Random(seed), 30):
            over, seconds = differences(attempt, simulator, taken)
            assert over.max() <= 0 and seconds <= ROUNDING
            run = simulator.run(attempt.plan(taken))
            assert problem.floor_bytes <= run.peak_bytes
            assert attempt.parts * problem.floor_s <= run.step_s * (1 + ROUNDING)


@pytest.mark.parametrize("words", CLASSES)
def test_chains_of_rebuilds_and_reruns_are_exact(words):
    """Residual blocks under batch norm: rebuilt from what is rebuilt, run anew from it, several at a time."""
    attempt, simulator = attempt_of(forked(3, 8, 32, 4), CPU, *words)
    problem, most = attempt.problem, 0
    for taken in choices(problem, random.Random(0), 150):
        over, seconds = differences(attempt, simulator, taken)
        assert not over.any() and abs(seconds) <= ROUNDING
        most = max([most, *(len(j.events) for j in problem.joints if j.met(taken))])
    assert most > 1


def test_what_is_decoded_for_a_rerun_from_several_sources():
    """In every form, of one, two and three of them: what the simulator says, to the byte."""
    attempt, simulator = attempt_of(skips(relus=False), CPU, "lossy", "fp8")
    problem, index, seen = attempt.problem, attempt._build.index, set()
    for taken in choices(problem, random.Random(0), 1000):
        lent = Context.of(attempt.plan(taken), index).decoded_for_segment or {}
        over, _ = differences(attempt, simulator, taken)
        assert not over.any()
        seen |= {sum(start in tasks for tasks in lent.values()) for start in set().union(*lent.values())}
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
@settings(deadline=None, max_examples=5, derandomize=True)
@given(graph=st.one_of(step_graphs(8, size=64, grown=True), OWN), words=st.sampled_from(CLASSES), seed=SEEDS)
def test_no_plan_of_the_class_is_below_the_bounds(device, graph, words, seed):
    """Segments, rebuilds and encodings all offered: as many choices as are drawn, against both bounds."""
    fidelity, lossy = words
    attempt, simulator = attempt_of(graph, device, fidelity, lossy)
    runs = [simulator.run(attempt.plan(t)) for t in choices(attempt.problem, random.Random(seed), 80)]
    given_words = {"fidelity": fidelity, "lossy": lossy, "algorithms": False}
    costs = cost_table(graph, device)
    least = minimise_peak(graph, costs, time_limit_s=1, **given_words).lower_bound_bytes
    assert least <= min(run.peak_bytes for run in runs)
    budget = sorted(run.peak_bytes for run in runs)[len(runs) // 3]
    plan = optimal(graph, costs, budget, time_limit_s=0.3, **given_words)
    fastest = min(run.step_s for run in runs if run.peak_bytes <= budget)
    assert plan.lower_bound_bytes <= plan.peak_bytes
    assert plan.gap is not None and plan.step_s * (1 - plan.gap) <= fastest * (1 + 4e-6)  # test_optimal.ROOM


AMOUNTS = st.lists(st.integers(-3, 5), min_size=6, max_size=6)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(AMOUNTS, min_size=1, max_size=4))
def test_several_events_need_the_most_that_one_of_them_needs(needed):
    """Task by task; what they take away, likewise."""
    added = {
        ((g, 1),): Part(
            tuple((t, t, n) for t, n in enumerate(row) if n), tuple((t, 0.1 * n) for t, n in enumerate(row))
        )
        for g, row in enumerate(needed)
    }
    own = (len(needed), 1)
    joints = joints_of((own,), added)
    for mask in range(2 ** len(needed)):
        taken = [mask >> g & 1 for g in range(len(needed))]
        met = [joint.part for joint in joints if joint.met([*taken, 1])]
        rows = np.array([[0] * 6, *(row for row, on in zip(needed, taken, strict=True) if on)])
        wanted = rows.max(axis=0) + rows.min(axis=0)
        assert (spread(met, np.zeros(6, dtype=np.int64)) == wanted).all()
        assert sum(part.seconds for part in met) == pytest.approx(0.1 * wanted.sum())
        assert not any(joint.met([*taken, 0]) for joint in joints)
