"""moDNN as a late rival of `optimal`, given up where time is up."""

from gistkit.api.planning import plan_graph
from gistkit.ir.plan import Plan
from gistkit.planning import choose as named
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.plain import plain
from tests.support.zoo_steps import of_zoo


def test_who_was_given_up_for_times_sake_is_named(monkeypatch):
    """No time for any seed, then none for what is late either: the plan says so, and still does when it was a file."""
    graph = of_zoo("vgg16", 32)
    costs = cost_table(graph, hardware("titanx"))
    budget = plain(graph, costs).peak_bytes
    assert plan_graph(graph, costs, budget=budget).prediction.not_compared == ()
    monkeypatch.setattr(named, "LARGE_TASKS", 10)
    monkeypatch.setattr(named, "SEEDS_S", -1.0)
    made = []
    monkeypatch.setattr(named, "made", lambda name, *given, of=named.made: made.append(name) or of(name, *given))
    late = plan_graph(graph, costs, budget=budget)
    assert late.prediction.not_compared == () and made == list(named.SEEDS[:-1])
    monkeypatch.setattr(named, "LATE_S", -1.0)
    monkeypatch.setattr(named, "RIVAL_S", -1.0)
    plan = plan_graph(graph, costs, budget=budget)
    assert plan.prediction.not_compared == named.SEEDS
    assert Plan.from_json(plan.to_json()) == plan
