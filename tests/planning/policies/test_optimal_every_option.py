"""`optimal` against brute force over every option of every tensor, in graphs of eight tensors that have many.

tests/planning/policies/test_optimal.py draws small graphs and thins their options. Here a graph grows until it has its
tensors, of images
of 64 x 64 (below 4 KiB nothing is encoded or shipped), and all that it offers goes through the simulator: up to 16,000
plans, of which no more than MOST are looked at.
"""

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.errors import BudgetError
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.options import options
from gistkit.planning.policies.optimal.attempt import Attempt
from gistkit.planning.policies.optimal.optimal import minimise_peak, optimal
from gistkit.planning.simulate.simulator import Simulator, simulate
from tests.planning.policies.test_optimal import CPU, CUDA, LINKED, ROOM, SHARED, brute_force
from tests.support.step_graphs import step_graphs

MOST = 4000
SETTINGS = {"algorithms": False, "recompute": False, "time_limit_s": 20}


def no_more_than(most, listed):
    """The options, with the last of the longest list left out until their combinations are no more than ``most``."""
    left = dict(listed)
    while prod(map(len, left.values())) > most:
        longest = max(left, key=lambda s: len(left[s]))
        left[longest] = left[longest][:-1]
    return left


def budget_between(data, runs):
    least, most = min(p for p, _ in runs), max(p for p, _ in runs)
    return least + round(data.draw(st.sampled_from((0.0, 0.05, 0.2, 0.4, 0.7))) * (most - least))


@pytest.mark.parametrize("device", [CPU, LINKED, SHARED, CUDA], ids=["cpu", "link", "shared", "cuda"])
@settings(deadline=None, max_examples=4, derandomize=True)
@given(data=st.data())
def test_equals_brute_force(device, data):
    graph = data.draw(step_graphs(8, size=64, grown=True))
    costs = cost_table(graph, device)
    fidelity, lossy = data.draw(st.sampled_from((("bitwise", None), ("lossy", "fp8")))) if graph.batch == 1 else (
        "bitwise", None)  # fmt: skip
    offered = options(graph, costs, fidelity, lossy)
    listed = no_more_than(MOST, offered)
    runs = list(brute_force(graph, costs, listed))
    budget = budget_between(data, runs)
    best = min(s for p, s in runs if p <= budget)

    given_options = {} if listed == offered and fidelity == "bitwise" else {"options": listed}
    words = {"fidelity": fidelity, "lossy": lossy, **given_options, **SETTINGS}
    plan = optimal(graph, costs, budget, **words)
    run = simulate(graph, plan, costs)
    assert run.peak_bytes == plan.peak_bytes <= budget and run.step_s == plan.step_s
    assert best <= plan.step_s * (1 + 1e-9)
    assert plan.step_s <= best * (1 + 1e-9) + ROOM * run.compute_s
    least = min(p for p, _ in runs)
    assert minimise_peak(graph, costs, **words).peak_bytes == least
    with pytest.raises(BudgetError) as refused:
        optimal(graph, costs, least - 1, **words)
    assert refused.value.least_bytes == {fidelity: least}


@pytest.mark.parametrize("device", [CPU, LINKED, CUDA], ids=["cpu", "link", "cuda"])
@settings(deadline=None, max_examples=3, derandomize=True)
@given(data=st.data())
def test_slices_and_sub_batches_equal_brute_force(device, data):
    """Up to MOST / 4 choices for each number of sub-batches, those of slices among them."""
    graph = data.draw(step_graphs(8, size=64, grown=True).filter(lambda g: g.batch > 1))
    costs = cost_table(graph, device)
    listed = no_more_than(200, options(graph, costs, "reassociated"))
    simulator, runs, counts = Simulator(graph, costs), [], sorted({1, 2, graph.batch})
    attempts = [attempt(graph, costs, simulator, listed, parts) for parts in counts]
    while max(prod(map(len, a.problem.groups)) for a in attempts) > MOST // 4:
        listed = no_more_than(prod(map(len, listed.values())) - 1, listed)
        attempts = [attempt(graph, costs, simulator, listed, parts) for parts in counts]
    for a in attempts:
        choices = product(*(range(len(group)) for group in a.problem.groups))
        ran = (simulator.run(a.plan(taken)) for taken in choices if a.problem.allowed(taken))
        runs += [(run.peak_bytes, run.step_s) for run in ran]
    budget = budget_between(data, runs)
    best = min(s for p, s in runs if p <= budget)
    plan = optimal(graph, costs, budget, fidelity="reassociated", batch_norm=True, options=listed, **SETTINGS)
    run = simulate(graph, plan, costs)
    assert run.peak_bytes <= budget
    assert best <= run.step_s * (1 + 1e-9)
    assert run.step_s <= best * (1 + 1e-9) + ROOM * run.compute_s


def attempt(graph, costs, simulator, listed, parts):
    return Attempt(graph, costs, simulator, "reassociated", None, parts=parts, found=listed, algorithms=False)
