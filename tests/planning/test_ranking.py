"""Which plan `optimal` hands out: the fastest, the host's share in it; which policies it had no time for."""

from dataclasses import replace

import pytest

from gistkit.api.planning import plan_graph
from gistkit.errors import BudgetError
from gistkit.ir.plan import Plan
from gistkit.planning import choose
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.registry import POLICIES
from tests.support.step_graphs import chain, forked
from tests.support.zoo_steps import of_zoo

CARD = replace(hardware("titanx"), launch_s=1e-7, host_s=1e-7, runtime_host_s=2e-7)
"""A link that is fast enough to hide behind the tasks."""


@pytest.mark.parametrize(("graph", "host_s"), [(chain(4, 8, 16, 4), 1e-4), (forked(2, 8, 16, 4), 2e-7)])
def test_no_policy_is_faster(graph, host_s):
    costs = cost_table(graph, replace(CARD, runtime_host_s=host_s))
    found = plan_graph(graph, costs, budget="70%")
    assert found.peak_bytes <= found.budget_bytes
    for policy in POLICIES:
        try:  # a refusal that names the least of every class takes seconds
            other = plan_graph(graph, costs, budget="70%", policy=policy, refuse=False)
        except BudgetError:
            continue
        if other.fidelity == "bitwise" and policy != "plain" and other.peak_bytes <= other.budget_bytes:
            assert found.step_s <= other.step_s * (1 + 1e-6), policy


def test_who_was_left_out_for_times_sake_is_named(monkeypatch):
    """No time for moDNN's schedule of a large step; the plan still says so when it was a file."""
    graph = of_zoo("vgg16", 32)
    costs = cost_table(graph, hardware("titanx"))
    budget = POLICIES["plain"](graph, costs).peak_bytes
    assert plan_graph(graph, costs, budget=budget).prediction.not_compared == ()
    monkeypatch.setattr(choose, "LARGE_TASKS", 10)
    plan = plan_graph(graph, costs, budget=budget)
    assert plan.prediction.not_compared == ("modnn",)
    assert Plan.from_json(plan.to_json()) == plan
