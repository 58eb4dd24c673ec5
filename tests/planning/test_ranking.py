"""Which plan `optimal` hands out: the fastest, the host's share in it; which policies it had no time for."""

from gistkit.api.planning import plan_graph
from gistkit.ir.plan import Plan
from gistkit.planning import choose
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.registry import POLICIES
from tests.support.zoo_steps import of_zoo


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
