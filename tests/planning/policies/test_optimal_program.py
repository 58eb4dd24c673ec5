"""The program of `optimal`: bounds on every choice, rows that bar what cannot be together; plans cut short."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.policies.optimal.plans import plan_of
from gistkit.planning.policies.optimal.program import Program
from gistkit.planning.policies.optimal.state import IncrementalState
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import simulate
from tests.planning.policies.test_optimal import CPU, LINKED, SHARED
from tests.planning.policies.test_optimal_state import CLASSES, GRAPHS, choices, problem_of
from tests.support.zoo_steps import of_zoo


@pytest.mark.parametrize("device", [CPU, LINKED, SHARED], ids=["cpu", "link", "shared"])
@settings(deadline=None, max_examples=8, derandomize=True)
@given(graph=GRAPHS, words=st.sampled_from(CLASSES), seed=st.integers(0, 2**20))
def test_no_choice_is_below_the_relaxation(device, graph, words, seed):
    problem = problem_of(graph, device, *words)
    runs = [problem.simulator.run(plan_of(problem, s.taken)) for s in choices(problem, random.Random(seed), 20)]
    budget = sorted(run.peak_bytes for run in runs)[5]
    program = Program(problem)
    bound_s = program.least_time(budget, 10, relaxed=True).bound
    assert 0 < bound_s <= min(run.step_s for run in runs if run.peak_bytes <= budget)
    assert 0 < program.least_peak(10, relaxed=True).bound <= min(run.peak_bytes for run in runs)
    assert program.least_time(1, 10, relaxed=True).bound == np.inf


@settings(deadline=None, max_examples=8, derandomize=True)
@given(graph=GRAPHS, words=st.sampled_from(CLASSES))
def test_a_whole_solution_is_a_choice(graph, words):
    """Nothing is asked of what cannot serve, segments are taken whole."""
    problem = problem_of(graph, CPU, *words)
    budget = int(1.2 * problem.floor_bytes)
    solved = Program(problem).least_time(budget, 20)
    if solved.shares is not None:
        taken = [int(np.argmax(part)) for part in np.split(solved.shares, problem.offsets[1:-1])]
        assert IncrementalState(problem, taken).taken == taken


def test_a_search_that_is_cut_short_gives_its_best_plan_and_a_true_gap():
    graph = of_zoo("resnet50")
    costs = cost_table(graph, hardware("h200"))
    budget = POLICIES["plain"](graph, costs).peak_bytes * 3 // 4
    cut, long = (optimal(graph, costs, budget, time_limit_s=seconds) for seconds in (1e-3, 2))
    for plan in (cut, long):
        run = simulate(graph, plan, costs)
        assert run.peak_bytes == plan.peak_bytes <= budget and run.step_s == plan.step_s
        assert plan.gap is not None and 0 <= plan.gap < 1
    # Each gap is against a bound from below on every plan, so on the other's too.
    assert cut.step_s * (1 - cut.gap) <= long.step_s * (1 + 1e-5)
    assert long.step_s * (1 - long.gap) <= cut.step_s * (1 + 1e-5)
