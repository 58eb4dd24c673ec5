"""`optimal` against brute force with segments among the moves: every candidate on and off, with what is tied to it."""

from itertools import product
from math import prod

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gistkit.errors import BudgetError
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.attempt import NO_PEAK, Attempt
from gistkit.planning.policies.optimal.optimal import minimise_peak, optimal
from gistkit.planning.simulate.simulator import Simulator, simulate
from tests.planning.policies.test_optimal import CPU, CUDA, FIXED, LINKED, ROOM
from tests.support.step_graphs import step_graphs

MOST = 500
"""Choices of one graph that are simulated."""


@pytest.mark.parametrize("device", [CPU, LINKED, CUDA], ids=["cpu", "link", "cuda"])
@settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_equals_brute_force_with_segments(device, data):
    graph = data.draw(step_graphs(data.draw(st.integers(3, 5)), size=32, grown=True, varied=True))
    costs = cost_table(graph, device)
    attempt = Attempt(graph, costs, Simulator(graph, costs), "bitwise", None, algorithms=False)
    problem = attempt.problem
    assume(problem.ties and prod(map(len, problem.groups)) <= MOST)
    choices = (c for c in product(*(range(len(group)) for group in problem.groups)) if problem.allowed(c))
    runs = [run for run in map(attempt.clock, choices) if run[1] < NO_PEAK]
    least, most = min(p for _, p in runs), max(p for _, p in runs)
    budget = least + round(data.draw(st.sampled_from((0.0, 0.1, 0.4, 0.8))) * (most - least))
    best = min(s for s, p in runs if p <= budget)

    plan = optimal(graph, costs, budget, **FIXED)
    run = simulate(graph, plan, costs)
    assert run.peak_bytes == plan.peak_bytes <= budget and plan.lower_bound_bytes <= least
    assert plan.step_s == run.step_s <= best * (1 + 1e-9) + ROOM * run.compute_s
    assert plan.step_s * (1 - plan.gap) <= best * (1 + ROOM)
    if not device.has_link:  # over a link times are chosen that are no moves at first
        assert best <= plan.step_s * (1 + 1e-9) and plan.gap == 0.0
    with pytest.raises(BudgetError) as refused:
        optimal(graph, costs, least - 1, **FIXED)
    assert refused.value.least_bytes == {"bitwise": least}
    assert minimise_peak(graph, costs, **FIXED).peak_bytes == least
