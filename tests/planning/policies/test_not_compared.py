"""Policies that `optimal` had no time to plan, moDNN's schedule among them, are named in the plan."""

from gistkit.api.planning import plan_graph
from gistkit.ir.plan import Plan
from gistkit.planning import choose
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.registry import plain
from tests.support.zoo_steps import of_zoo


def test_who_was_given_up_for_times_sake_is_named(monkeypatch):
    """No time for any seed, then none for moDNN's schedule either; the plan still says so when it was a file."""
    graph = of_zoo("vgg16", 32)
    costs = cost_table(graph, hardware("titanx"))
    budget = plain(graph, costs).peak_bytes
    assert plan_graph(graph, costs, budget=budget).prediction.not_compared == ()
    monkeypatch.setattr(choose, "LARGE_TASKS", 10)
    monkeypatch.setattr(choose, "SEEDS_S", -1.0)
    assert plan_graph(graph, costs, budget=budget).prediction.not_compared == choose.SEEDS[:-1]
    monkeypatch.setattr(choose, "MODNN_S", -1.0)
    plan = plan_graph(graph, costs, budget=budget)
    assert plan.prediction.not_compared == choose.SEEDS
    assert Plan.from_json(plan.to_json()) == plan
