"""Which plan `optimal` hands out: the fastest on the wall, where copies hide behind nothing and the host issues; which
policies it had no time for."""

from dataclasses import replace

import pytest

from gistkit.api.planning import plan_graph
from gistkit.errors import BudgetError
from gistkit.ir.plan import Plan
from gistkit.planning import choose
from gistkit.planning.choose import fastest_on_the_wall
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import Simulator
from tests.support.step_graphs import chain, forked
from tests.support.zoo_steps import of_zoo

CARD = replace(hardware("titanx"), launch_s=1e-7, tells_algorithms=False, host_s=1e-7, runtime_host_s=2e-7)
"""A link that is fast enough to hide behind the tasks, and a host that issues in no time."""
CHAIN = chain(8, 16, 32, 8)


def planned(graph, costs, policy, share):
    return plan_graph(graph, costs, budget=f"{round(100 * share)}%", policy=policy, fidelity="bitwise")


def hidden_and_rerun(graph, card=CARD):
    """vDNN_all's plan as if the search had found it, the checkpoints' plan, and a budget that both fit."""
    costs = cost_table(graph, card)
    sent = replace(POLICIES["vdnn-all"](graph, costs), policy="optimal", gap=0.0, details={"fidelity": "bitwise"})
    again = POLICIES["checkpoint"](graph, costs)
    return costs, sent, again, max(sent.peak_bytes, again.peak_bytes)


def test_what_hides_on_the_device_alone_gives_way():
    graph = CHAIN
    costs, sent, again, budget = hidden_and_rerun(graph)
    simulator = Simulator(graph, costs)
    assert simulator.wall_s(sent) > simulator.wall_s(replace(again, policy="optimal"))
    found = fastest_on_the_wall(graph, costs, budget, sent, [again], "bitwise")
    assert found.policy == "optimal" and found.details["taken_from"] == "checkpoint"
    run = simulator.run(found)
    assert (found.peak_bytes, found.step_s) == (run.peak_bytes, run.step_s) and found.peak_bytes <= budget
    assert found.gap == pytest.approx(max(0.0, 1 - sent.step_s / found.step_s), abs=1e-5)
    assert found.lower_bound_bytes <= found.peak_bytes


def test_what_does_not_fit_or_is_not_of_the_class_is_no_candidate():
    graph = CHAIN
    costs, sent, again, _ = hidden_and_rerun(graph)
    tight = min(sent.peak_bytes, again.peak_bytes) - 1
    assert fastest_on_the_wall(graph, costs, tight, sent, [again], "bitwise") is sent
    other = replace(again, fidelity="reassociated")
    assert fastest_on_the_wall(graph, costs, None, sent, [other], "bitwise") is sent
    assert fastest_on_the_wall(graph, costs, None, sent, [other], "reassociated") is not sent
    budget = max(sent.peak_bytes, again.peak_bytes)
    assert fastest_on_the_wall(graph, costs, budget, sent, [again], "bitwise", reserve=1) is sent


def test_where_the_host_is_slowest_the_device_decides():
    graph = CHAIN
    costs, sent, again, _ = hidden_and_rerun(graph, replace(CARD, runtime_host_s=1.0))
    # A segment that runs anew is issued anew: with a slow host it is the slower one.
    assert fastest_on_the_wall(graph, costs, None, sent, [again], "bitwise") is sent
    same = replace(sent, policy="gist")
    assert fastest_on_the_wall(graph, costs, None, sent, [same], "bitwise") is sent, "of equals the search's"


@pytest.mark.parametrize("graph", [chain(4, 8, 16, 4), forked(2, 8, 16, 4)], ids=["chain", "forked"])
def test_no_policy_is_faster_on_the_wall(graph):
    costs = cost_table(graph, CARD)
    found = planned(graph, costs, "optimal", 0.7)
    assert found.peak_bytes <= found.budget_bytes
    for policy in POLICIES:
        try:
            other = planned(graph, costs, policy, 0.7)
        except BudgetError:
            continue
        if other.fidelity == "bitwise" and policy != "plain":
            assert found.prediction.wall_s <= other.prediction.wall_s * (1 + 1e-6), policy


def test_who_was_given_up_for_times_sake_is_named(monkeypatch):
    """No time for any seed, then none for moDNN's schedule either; the plan still says so when it was a file."""
    graph = of_zoo("vgg16", 32)
    costs = cost_table(graph, hardware("titanx"))
    budget = POLICIES["plain"](graph, costs).peak_bytes
    assert plan_graph(graph, costs, budget=budget).prediction.not_compared == ()
    monkeypatch.setattr(choose, "LARGE_TASKS", 10)
    monkeypatch.setattr(choose, "SEEDS_S", -1.0)
    assert plan_graph(graph, costs, budget=budget).prediction.not_compared == choose.SEEDS[:-1]
    monkeypatch.setattr(choose, "MODNN_S", -1.0)
    plan = plan_graph(graph, costs, budget=budget)
    assert plan.prediction.not_compared == choose.SEEDS
    assert Plan.from_json(plan.to_json()) == plan
