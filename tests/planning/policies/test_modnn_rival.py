"""moDNN as a late rival of `optimal`, given up where time is up."""

import pytest

from gistkit.api.planning import plan_graph
from gistkit.ir.plan import Plan
from gistkit.planning import choose as named
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.modnn.modnn import modnn
from gistkit.planning.policies.modnn.sub_batch import least_bytes
from gistkit.planning.policies.plain import plain
from tests.support.zoo_steps import of_zoo


@pytest.fixture(scope="module")
def step():
    graph = of_zoo("vgg16", 32)
    return graph, cost_table(graph, hardware("titanx"))


def test_a_large_step_asks_modnn_last_and_is_never_slower(step, monkeypatch):
    graph, costs = step
    least = least_bytes(graph, costs)["bitwise"]
    calls = []

    def spied(*given, **words):
        calls.append(modnn(*given, **words))
        return calls[-1]

    monkeypatch.setattr(named, "LARGE_TASKS", 10)
    monkeypatch.setitem(named.POLICIES, "modnn", spied)
    plan = plan_graph(graph, costs, budget=int(1.1 * least), policy="optimal")
    assert len(calls) == 1
    theirs = modnn(graph, costs, int(1.1 * least), fidelity="bitwise")
    assert theirs.peak_bytes > int(1.1 * least) or plan.step_s <= theirs.step_s * (1 + 1e-9)


def test_who_was_given_up_for_times_sake_is_named(step, monkeypatch):
    """No time for any seed, then none for what is late either: the plan says so, and still does when it was a file."""
    graph, costs = step
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
