"""The least peak that `optimal` names: no policy's plan of the class is below its bound, and it can be met."""

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.checkpoint import checkpoint
from gistkit.planning.policies.optimal.optimal import minimise_peak, optimal
from gistkit.planning.policies.registry import plain
from gistkit.planning.simulate.simulator import simulate
from tests.planning.policies.test_optimal import NEAR
from tests.support.zoo_steps import of_zoo

CPU = hardware("cpu")


def convolutions():
    layers = [m for _ in range(6) for m in (nn.GELU(), nn.Conv2d(8, 8, 3, padding=1))]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), *layers, *head)


def test_what_can_only_be_kept_as_it_is_may_run_anew():
    """On hardware without a link many storages have one form only; those segments bring back are no less free. None of
    it depends on the time that the search gets."""
    with torch.device("meta"):
        x, y = torch.empty(4, 8, 32, 32), torch.empty(4, dtype=torch.long)
        graph = gistkit.capture(convolutions(), (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    costs = cost_table(graph, CPU)
    plan = checkpoint(graph, costs)
    again = [d for d in plan.decisions if d.codec == "recompute"]
    least = minimise_peak(graph, costs, time_limit_s=0.5)
    assert again and least.lower_bound_bytes <= least.peak_bytes <= plan.peak_bytes * NEAR
    found = optimal(graph, costs, plan.peak_bytes, seeds=[plan], time_limit_s=0.5)
    assert found.peak_bytes <= plan.peak_bytes and found.step_s <= plan.step_s
    assert found.gap is not None and found.step_s * (1 - found.gap) <= plan.step_s


def test_a_search_that_is_cut_short_gives_its_best_plan_and_a_true_gap():
    graph = of_zoo("resnet18")
    costs = cost_table(graph, hardware("h200"))
    budget = plain(graph, costs).peak_bytes * 19 // 20
    cut, long = (optimal(graph, costs, budget, time_limit_s=seconds) for seconds in (1e-3, 0.5))
    for plan in (cut, long):
        run = simulate(graph, plan, costs)
        assert run.peak_bytes == plan.peak_bytes <= budget and run.step_s == plan.step_s
        assert plan.gap is not None and 0 <= plan.gap < 1
    # Each gap is against a bound from below on every plan, so on the other's too.
    assert cut.step_s * (1 - cut.gap) <= long.step_s * (1 + 1e-5)
    assert long.step_s * (1 - long.gap) <= cut.step_s * (1 + 1e-5)
