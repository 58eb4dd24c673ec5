"""`optimal` under a time limit: the best plan found until then, with a gap that is true."""

import time

import pytest
import torch

from gistkit import zoo
from gistkit.capture.entry import capture
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal import refine as optimal_refine
from gistkit.planning.policies.optimal.attempt import Attempt
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.policies.optimal.program import Program
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import Simulator, simulate


def test_a_search_that_is_cut_short_gives_its_best_plan_and_a_true_gap():
    with torch.device("meta"):
        graph = capture(zoo.resnet50(10, 32), (torch.empty(8, 3, 32, 32),), backward=True)
    costs = cost_table(graph, hardware("h200"))
    budget = POLICIES["plain"](graph, costs).peak_bytes * 3 // 4
    cut, long = (optimal(graph, costs, budget, time_limit_s=seconds) for seconds in (1e-3, 2))
    for plan in (cut, long):
        run = simulate(graph, plan, costs)
        assert run.peak_bytes == plan.peak_bytes <= budget and run.step_s == plan.step_s
        assert plan.gap is not None and 0 < plan.gap < 1
    assert long.step_s <= cut.step_s and long.gap <= cut.gap
    # Each gap is against a bound from below on every plan, so on the other's too.
    assert cut.step_s * (1 - cut.gap) <= long.step_s * (1 + 1e-9)
    assert long.step_s * (1 - long.gap) <= cut.step_s * (1 + 1e-9)


@pytest.mark.parametrize(("huge", "before"), [(0, True), (10**9, False)])
def test_of_a_huge_problem_the_best_seed_is_improved_before_the_relaxation(huge, before, monkeypatch):
    with torch.device("meta"):
        graph = capture(zoo.resnet18(10, 32), (torch.empty(8, 3, 32, 32),), backward=True)
    costs = cost_table(graph, hardware("h200"))
    attempt = Attempt(graph, costs, Simulator(graph, costs), "bitwise", None, algorithms=False)
    seed = attempt.search.smallest()
    seconds, peak = attempt.clock(seed)
    seen, least_time = [], Program.least_time
    monkeypatch.setattr(optimal_refine, "HUGE_SIZE", huge)
    refinement = optimal_refine.Refinement(attempt.problem, attempt.search, peak, time.monotonic() + 2)
    monkeypatch.setattr(Program, "least_time", lambda *a, **k: seen.append(refinement._best_s) or least_time(*a, **k))
    assert refinement.run([seed], ()).seconds <= seconds
    assert (seen[0] < seconds) == before
