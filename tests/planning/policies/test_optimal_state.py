"""The sums of `optimal` against the simulator: a state is what it says, no bound is above it, whatever is chosen."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.plans import clock, plan_of
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.state import IncrementalState
from gistkit.planning.policies.optimal.variants import Allowed, level_of
from gistkit.planning.simulate.simulator import Simulator
from tests.planning.policies.test_optimal import CUDA, SHARED
from tests.support.step_graphs import Step, chain, forked, step_graphs

CLASSES = (("bitwise", None), ("reassociated", None), ("lossy", "fp8"))
ROUNDING = 1e-9
"""Of sums of some hundred seconds of double precision, relative."""


def skips():
    """Maps that are read again further on, beside others that nothing comes of: reruns start from up to three."""
    step = Step(2)
    x = step.conv(step.input(3, 32, 32), 8)
    step.add(step.add(x, x), x)
    y = step.batch_norm(x)
    step.conv(y, 8)
    z = step.relu(y)
    a = step.conv(z, 8)
    b = step.conv(step.add(z, a), 8)
    c = step.batch_norm(step.add(b, a))
    step.batch_norm(c)
    d = step.relu(c)
    step.conv(step.relu(c), 8)
    e = step.batch_norm(d)
    return step.finish(step.add(step.batch_norm(e), e))


GRAPHS = st.one_of(
    step_graphs(12, size=64, grown=True), st.sampled_from((skips(), chain(8, 8, 32, 4), forked(3, 8, 32, 4)))
)
"""A chain has so many encodings that they settle each other's scratches on CUDA."""


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


@pytest.mark.parametrize("device", [SHARED, CUDA], ids=["shared", "cuda"])
@settings(max_examples=8)
@given(graph=GRAPHS, words=st.sampled_from(CLASSES), seed=st.integers(0, 2**20))
def test_a_state_is_what_the_simulator_says_and_no_bound_is_above_it(device, graph, words, seed):
    for parts in (1, 2) if graph.batch > 1 and words[0] != "bitwise" else (1,):
        costs, draw = cost_table(graph, device), random.Random(seed)
        problem = Problem(graph, costs, Simulator(graph, costs), Allowed(*words), parts)
        for state in choices(problem, draw, 12):
            run = problem.simulator.run(plan_of(problem, state.taken))
            assert state.level.tolist() == list(run.memory_bytes)
            assert state.seconds() == pytest.approx(clock(problem, state.taken)[0], rel=ROUNDING)
            assert parts * state.seconds() == pytest.approx(run.step_s, rel=2e-6 if device is CUDA else ROUNDING)
            deltas = [problem.least[problem.offsets[g] + v] for g, v in enumerate(state.taken)]
            assert (level_of(deltas, problem.base_bytes) <= state.level).all()
            assert sum(d.seconds for d in deltas) <= (state.compute_s - problem.base_s.sum()) * (1 + ROUNDING) + 1e-12
            assert problem.floor_bytes <= run.peak_bytes
            assert parts * problem.floor_s <= run.step_s * (1 + ROUNDING)
