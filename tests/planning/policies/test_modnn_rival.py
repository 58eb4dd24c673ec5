"""moDNN given up where it cannot be faster: what its schedule goes by, and `optimal` against it as a late rival."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.api.planning import plan_graph
from gistkit.ir.plan import Plan
from gistkit.planning import choose as named
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.modnn import schedule as modnn_schedule
from gistkit.planning.policies.modnn.modnn import modnn, modnn_unless
from gistkit.planning.policies.modnn.parts import least_bytes
from gistkit.planning.policies.optimal.fastest import Outcome
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.policies.optimal.planning import Planning
from gistkit.planning.policies.plain import plain
from tests.support.step_graphs import step_graphs
from tests.support.zoo_steps import of_zoo

CLASSES = st.sampled_from(("bitwise", "reassociated"))


def asked(graph, costs, budget, fidelity):
    """The plan of a schedule that nothing stops, and what it was said to take at least."""
    said = []
    plan = modnn_unless(graph, costs, budget, lambda least_s: bool(said.append(least_s)), fidelity=fidelity)
    return plan, said


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    step_graphs(), st.floats(0, 1), st.sampled_from(("bitwise", "reassociated")), st.sampled_from(("titanx", "k40m"))
)
def test_what_a_schedule_takes_at_least_is_never_above_what_the_simulator_says(graph, share, fidelity, device):
    costs = cost_table(graph, hardware(device))
    least, most = least_bytes(graph, costs)[fidelity], plain(graph, costs).peak_bytes
    budget = int(least + share * max(0, most - least))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modnn_schedule, "ASKED", 1)
        plan, said = asked(graph, costs, budget, fidelity)
    assert plan is not None and plan == modnn(graph, costs, budget, fidelity=fidelity)
    assert len(said) >= len(graph.tasks)  # and in between, while it looks ahead
    # Sums of at most a hundred seconds of double precision.
    assert max(said) <= plan.step_s * (1 + 1e-9)


@pytest.fixture(scope="module")
def step():
    graph = of_zoo("vgg16", 32)
    return graph, cost_table(graph, hardware("titanx"))


def test_it_is_given_up_as_soon_as_it_cannot_be_faster(step):
    graph, costs = step
    budget = plain(graph, costs).peak_bytes
    whole = modnn(graph, costs, budget, fidelity="bitwise")
    assert modnn_unless(graph, costs, budget, lambda least_s: least_s >= 0.0, fidelity="bitwise") is None
    slower = modnn_unless(graph, costs, budget, lambda least_s: least_s >= 2 * whole.step_s, fidelity="bitwise")
    assert slower == whole


def test_a_rival_is_taken_whole_only_where_it_is_faster(step):
    graph, costs = step
    budget = plain(graph, costs).peak_bytes
    told = []

    def rival(seconds):
        told.append(seconds)
        return modnn(graph, costs, budget, fidelity="bitwise")

    mine = optimal(graph, costs, budget, rivals={"modnn": rival}, time_limit_s=2)
    assert told and told[0] < np.inf
    assert mine.step_s <= modnn(graph, costs, budget, fidelity="bitwise").step_s


def test_a_large_step_asks_modnn_last_and_is_never_slower(step, monkeypatch):
    graph, costs = step
    least = least_bytes(graph, costs)["bitwise"]
    calls = []

    def spied(*given, **words):
        calls.append(modnn_unless(*given, **words))
        return calls[-1]

    monkeypatch.setattr(named, "LARGE_TASKS", 10)
    monkeypatch.setattr(named, "modnn_unless", spied)
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
    monkeypatch.setattr(modnn_schedule, "ASKED", 1)
    plan = plan_graph(graph, costs, budget=budget)
    assert plan.prediction.not_compared == named.SEEDS
    assert Plan.from_json(plan.to_json()) == plan


def nothing(planning, parts):
    search = planning._search(parts)
    return Outcome(search, None, np.inf, search.problem.floor_s)


def test_a_late_policy_that_is_faster_is_taken_whole(step, monkeypatch):
    """A search without time ends in something slower than vDNN+ at its best."""
    graph, costs = step
    monkeypatch.setattr(named, "LARGE_TASKS", 10)
    monkeypatch.setattr(named, "SEEDS_S", -1.0)
    monkeypatch.setattr(Planning, "_fastest", lambda planning, parts, *given, first: nothing(planning, parts))
    budget = plain(graph, costs).peak_bytes
    plan = plan_graph(graph, costs, budget=budget)
    others = [named.made(n, graph, costs, budget, {"reserve": 0, "fidelity": "bitwise"}) for n in named.SEEDS]
    fitting = {p.policy: p.step_s for p in others if p.peak_bytes <= budget and p.fidelity == "bitwise"}
    assert plan.details["taken_from"] in fitting and plan.prediction.not_compared == ()
    assert plan.step_s <= min(fitting.values()) * (1 + 1e-9) and plan.peak_bytes <= budget
