"""The sums of `optimal` against the simulator: a state is what it says, no bound is above it, whatever is chosen."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.bounds import Bounds
from gistkit.planning.policies.optimal.delta import level_of
from gistkit.planning.policies.optimal.link import stalled
from gistkit.planning.policies.optimal.optimal import minimise_peak, optimal
from gistkit.planning.policies.optimal.plans import plan_of
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.search import Search
from gistkit.planning.policies.optimal.state import IncrementalState
from gistkit.planning.policies.optimal.whole import Allowed
from gistkit.planning.simulate.context import Context
from gistkit.planning.simulate.simulator import Simulator
from tests.planning.policies.test_optimal import CPU, CUDA, LINKED, ROOM, SHARED
from tests.support.step_graphs import Step, chain, forked, step_graphs

CLASSES = (("bitwise", None), ("reassociated", None), ("lossy", "fp8"))
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


GRAPHS = st.one_of(
    step_graphs(12, size=64, grown=True), st.sampled_from((skips(), chain(8, 8, 32, 4), forked(3, 8, 32, 4)))
)
"""A chain has so many encodings that they settle each other's scratches on CUDA."""


def problem_of(graph, device, fidelity="bitwise", lossy=None, parts=1):
    costs = cost_table(graph, device)
    return Problem(graph, costs, Simulator(graph, costs), Allowed(fidelity, lossy), parts=parts)


def choices(problem, draw, count):
    """States, most of them with rebuilds or encodings wherever there are some, and with segments on."""
    for _ in range(count):
        liked = draw.choice(("rebuild", "zvc", "fp8", "dense"))
        taken = []
        for g, group in enumerate(problem.groups):
            free = [v for v in range(len(group)) if (g, v) not in problem.owner and group[v].segment < 0]
            found = [v for v in free if group[v].decision and liked in group[v].decision.codec]
            taken.append(draw.choice(found if found and draw.random() < 0.8 else free))
        state = IncrementalState(problem, taken)
        for segment in draw.sample([*problem.members], draw.randint(0, len(problem.members))):
            step = state.step(segment, 1)
            if step is not None:
                state.take(step)
        yield state


@pytest.mark.parametrize("device", [CPU, LINKED, SHARED, CUDA], ids=["cpu", "link", "shared", "cuda"])
@settings(deadline=None, max_examples=12, derandomize=True)
@given(graph=GRAPHS, words=st.sampled_from(CLASSES), seed=st.integers(0, 2**20))
def test_a_state_is_what_the_simulator_says_and_no_bound_is_above_it(device, graph, words, seed):
    for parts in (1, 2) if graph.batch > 1 and words[0] != "bitwise" else (1,):
        problem, draw = problem_of(graph, device, *words, parts=parts), random.Random(seed)
        for state in choices(problem, draw, 12):
            run = problem.simulator.run(plan_of(problem, state.taken))
            assert state.level.tolist() == list(run.memory_bytes)
            assert parts * state.seconds() == pytest.approx(run.step_s, rel=ROUNDING)
            deltas = [problem.least[problem.offsets[g] + v] for g, v in enumerate(state.taken)]
            assert (level_of(deltas, problem.base_bytes) <= state.level).all()
            assert sum(d.seconds for d in deltas) <= (state.compute_s - problem.base_s.sum()) * (1 + ROUNDING) + 1e-12
            assert problem.floor_bytes <= run.peak_bytes
            assert parts * problem.floor_s <= run.step_s * (1 + ROUNDING)


@pytest.mark.parametrize("device", [LINKED, SHARED, CUDA], ids=["link", "shared", "cuda"])
@settings(deadline=None, max_examples=15, derandomize=True)
@given(graph=GRAPHS, words=st.sampled_from(CLASSES), data=st.data())
def test_steps_lead_to_what_they_say(device, graph, words, data):
    problem = problem_of(graph, device, *words)
    now = IncrementalState(problem, Search(problem).fastest())
    for _ in range(data.draw(st.integers(1, 12))):
        group = data.draw(st.integers(0, len(problem.groups) - 1))
        step = now.step(group, data.draw(st.integers(0, len(problem.groups[group]) - 1)))
        if step is None:
            continue
        before, told = now.copy(), (now.level_after(step), now.seconds_after(step), now.compute_s + step.more_s)
        now.take(step)
        assert (now.level == told[0]).all()
        assert (now.seconds(), now.compute_s) == pytest.approx(told[1:], rel=1e-12)
        assert before.taken != now.taken
        anew = IncrementalState(problem, now.taken)
        assert anew.taken == now.taken and (anew.level == now.level).all()
        assert anew.seconds() == pytest.approx(now.seconds(), rel=ROUNDING)


def test_a_segment_is_taken_whole_or_not_at_all():
    problem = problem_of(chain(6, 8, 32, 4), CPU)
    segment, members = max(problem.members.items(), key=lambda item: len(item[1]))
    state = IncrementalState(problem, problem.home)
    assert state.step(*members[0]) is None
    state.take(state.step(segment, 1))
    assert all(state.taken[g] == v for g, v in members)
    state.take(state.step(members[0][0], problem.home[members[0][0]]))
    assert state.taken[segment] == 0 and not any(state.taken[g] == v for g, v in members)
    torn = list(problem.home)
    torn[members[0][0]] = members[0][1]
    assert IncrementalState(problem, torn).taken == problem.home


def test_what_is_decoded_for_a_rerun_from_several_sources():
    """In every form, of one, two and three of them: what the simulator says, to the byte."""
    problem, seen = problem_of(skips(relus=False), CPU, "lossy", "fp8"), set()
    for state in choices(problem, random.Random(0), 600):
        plan = plan_of(problem, state.taken)
        lent = Context.of(plan, problem.index).decoded_for_segment or {}
        assert state.level.tolist() == list(problem.simulator.run(plan).memory_bytes)
        seen |= {sum(start in tasks for tasks in lent.values()) for start in set().union(*lent.values())}
    assert seen == {1, 2, 3}


@pytest.mark.parametrize("device", [CPU, LINKED, CUDA], ids=["cpu", "link", "cuda"])
@settings(deadline=None, max_examples=5, derandomize=True)
@given(graph=GRAPHS, words=st.sampled_from(CLASSES), seed=st.integers(0, 2**20))
def test_no_plan_of_the_class_is_below_the_bounds(device, graph, words, seed):
    """Segments, rebuilds and encodings all offered: as many choices as are drawn, against both bounds."""
    problem, costs = problem_of(graph, device, *words), cost_table(graph, device)
    runs = [problem.simulator.run(plan_of(problem, s.taken)) for s in choices(problem, random.Random(seed), 60)]
    given_words = {"fidelity": words[0], "lossy": words[1], "algorithms": False}
    least = minimise_peak(graph, costs, time_limit_s=1, **given_words)
    assert least.lower_bound_bytes <= min(run.peak_bytes for run in runs)
    budget = max(least.peak_bytes, sorted(run.peak_bytes for run in runs)[len(runs) // 3])
    plan = optimal(graph, costs, budget, time_limit_s=0.3, **given_words)
    fastest = min((run.step_s for run in runs if run.peak_bytes <= budget), default=np.inf)
    bounds = Bounds(problem)
    assert bounds.seconds(budget, problem.floor_s).value <= fastest * (1 + ROUNDING)
    assert bounds.peak_bytes(least.peak_bytes).value <= least.peak_bytes
    assert plan.lower_bound_bytes <= plan.peak_bytes <= budget
    assert plan.step_s * (1 - plan.gap) <= fastest * (1 + ROOM)


def test_stalls_by_hand():
    tasks = np.ones(6)
    assert stalled(tasks, [], 1.0) == 0.0
    assert stalled(tasks, [(1, 3, 0, 2.0), (3, 4, 1, 1.0)], 1.0) == 0.0
    assert stalled(tasks, [(1, 3, 0, 2.5)], 1.0) == 0.5
    assert stalled(tasks, [(2, 2, 1, 3.0)], 1.0) == 3.0
    # Behind each other: 1 to 2.5 and 2.5 to 4, the second wanted at 3.
    assert stalled(tasks, [(1, 4, 0, 1.5), (1, 3, 0, 1.5)], 1.0) == 0.0
    assert stalled(tasks, [(1, 2, 0, 1.5), (1, 3, 0, 1.5)], 1.0) == pytest.approx(1.0)
    # Both directions from 1 on at three quarters: the shorter ends at 1 + 1.5 / 0.75 = 3, the other half a second on.
    assert stalled(tasks, [(1, 3, 0, 1.5), (1, 3, 1, 2.0)], 0.75) == pytest.approx(0.5)
    assert stalled(tasks, [(1, 2, 0, 9.0), (1, 3, 0, 9.0)], 1.0, most_s=1.0) > 1.0


@pytest.mark.parametrize("both_gbps", [14.0, 9.0, 5.0])
def test_a_slow_link_stalls_as_in_the_simulator(both_gbps):
    problem = problem_of(chain(5, 8, 32, 4), replace(hardware("cpu"), d2h_gbps=6.0, h2d_gbps=8.0, both_gbps=both_gbps))
    for state in choices(problem, random.Random(1), 60):
        seconds = problem.simulator.run(plan_of(problem, state.taken)).step_s
        assert state.seconds() == pytest.approx(seconds, rel=ROUNDING)
