"""`optimal` against the other policies, segments that run anew, whole plans of others, what a refused budget names."""

from dataclasses import replace

import pytest

from bench.optimal import line, main, rows, wrong
from gistkit.errors import BudgetError, PlanError
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.cost.devices import Hardware, hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.checkpoint import checkpoint
from gistkit.planning.policies.optimal.optimal import minimise_peak, optimal
from gistkit.planning.policies.optimal.planning import Planning
from gistkit.planning.policies.optimal.whole import Allowed, fastest_whole
from gistkit.planning.policies.registry import POLICIES
from gistkit.planning.simulate.simulator import Simulator, simulate
from tests.support.step_graphs import chain
from tests.support.zoo_steps import of_zoo

CPU = hardware("cpu")
BITWISE = Allowed()


@pytest.mark.parametrize(("name", "device"), [("nin", "h200"), ("vgg16", "titanx")])
def test_never_slower_than_a_policy_that_fits(name, device):
    graph = of_zoo(name, 32)
    found = list(rows(name, graph, cost_table(graph, hardware(device)), 3))
    assert len(found) == 3
    assert [wrong(row) for row in found] == ["", "", ""]
    assert any(p["fits"] for p in found[-1]["policies"].values())
    assert name in line(found[0])


def test_of_the_lossy_class_gist_is_compared_with_the_format_too():
    graph = of_zoo("nin", 32)
    (row,) = rows("nin", graph, cost_table(graph, hardware("h200")), 3, "lossy", "fp8", only=[1])
    assert wrong(row) == "" and row["lossy"] == "fp8"
    assert row["policies"]["gist fp8"]["peak_bytes"] < row["policies"]["gist"]["peak_bytes"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_the_simulator_refuses_is_not_taken(share, monkeypatch):
    """A choice that the problem allows and the simulator does not, as a chain of three rebuilds from what is away."""
    graph, costs = chained()
    least, most = minimise_peak(graph, costs).peak_bytes, POLICIES["plain"](graph, costs).peak_bytes
    budget = int(least + share * (most - least))
    taken = optimal(graph, costs, budget)
    again = {d.storage for d in taken.decisions if d.codec == "recompute"}
    assert again
    run = Simulator.run

    def refuses(simulator, plan, **words):
        if again <= {d.storage for d in plan.decisions if d.codec == "recompute"}:
            raise PlanError("away")
        return run(simulator, plan, **words)

    monkeypatch.setattr(Simulator, "run", refuses)
    try:
        other = optimal(graph, costs, budget)
    except BudgetError as error:
        assert error.least_bytes["bitwise"] > budget
    else:
        assert other.peak_bytes <= budget and other.step_s >= taken.step_s * (1 - 1e-9)
        assert not again <= {d.storage for d in other.decisions if d.codec == "recompute"}


@pytest.mark.parametrize("fidelity", ["reassociated", "lossy"])
def test_a_wider_class_is_never_slower(fidelity, monkeypatch):
    """Where its larger program finds nothing in its time, the bitwise plan is there."""
    graph, costs = chained()
    budget = int(POLICIES["plain"](graph, costs).peak_bytes * 0.8)
    bitwise = optimal(graph, costs, budget)
    run = Planning.run

    def nothing(planning, starts=()):
        run(planning, starts)
        planning.plan = planning.plan if planning._allowed.fidelity == "bitwise" else None
        return planning

    words = {"fidelity": fidelity, "lossy": "fp8" if fidelity == "lossy" else None}
    wide = optimal(graph, costs, budget, **words)
    assert wide.step_s <= bitwise.step_s * (1 + 1e-9)
    monkeypatch.setattr(Planning, "run", nothing)
    taken = optimal(graph, costs, budget, **words)
    assert (taken.step_s, taken.decisions, taken.fidelity) == (bitwise.step_s, bitwise.decisions, "bitwise")
    assert taken.peak_bytes <= budget and taken.details["fidelity"] == fidelity and "taken_from" not in taken.details


def test_the_harness_sees_what_is_wrong():
    fits = {"step_s": 1.0, "peak_bytes": 9, "fits": True}
    row = {"policies": {"plain": fits}, "budget_bytes": 10, "optimal": {"step_s": 1.1, "peak_bytes": 10}}
    assert "plain 1000.000 ms" in wrong(row)
    assert wrong({**row, "optimal": {"step_s": 1.0, "peak_bytes": 10}}) == ""
    assert "above the budget" in wrong({**row, "optimal": {"step_s": 0.5, "peak_bytes": 11}})
    assert "plain has one" in wrong({**row, "optimal": None})
    assert wrong({**row, "policies": {"plain": {**fits, "fits": False}}}) == ""


def test_the_harness_refuses_to_run_without_networks(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "--networks" in capsys.readouterr().err


def chained(device=CPU):
    """A chain whose maps shrink in none of its layers: segments pay."""
    graph = chain(6, 8, 32, 4)
    return graph, cost_table(graph, device)


def test_segments_run_anew_where_nothing_else_is_left():
    graph, costs = chained()
    kept = minimise_peak(graph, costs, recompute=False, time_limit_s=20).lower_bound_bytes
    least = minimise_peak(graph, costs, time_limit_s=20).lower_bound_bytes
    assert least < kept
    plan = optimal(graph, costs, (least + kept) // 2, time_limit_s=6)
    assert any(d.codec == "recompute" for d in plan.decisions)
    assert plan.fidelity == "bitwise" and all(d.reason for d in plan.decisions)
    run = simulate(graph, plan, costs)
    assert run.peak_bytes == plan.peak_bytes <= (least + kept) // 2 and run.step_s == plan.step_s
    with pytest.raises(BudgetError):
        optimal(graph, costs, (least + kept) // 2, recompute=False, time_limit_s=2)


def test_checkpoints_are_a_seed_like_any_other():
    graph = of_zoo("resnet18", 32)
    costs = cost_table(graph, hardware("h200"))
    seed = checkpoint(graph, costs)
    plan = optimal(graph, costs, seed.peak_bytes, seeds=[seed], time_limit_s=3)
    assert plan.peak_bytes <= seed.peak_bytes and plan.step_s <= seed.step_s * (1 + 1e-9)


def test_a_whole_plan_of_the_class_is_taken_over():
    graph, costs = chained()
    simulator = Simulator(graph, costs)
    plain, seed = POLICIES["plain"](graph, costs), checkpoint(graph, costs, segments=3)
    assert fastest_whole([seed], graph, simulator, BITWISE, None).details == {"taken_from": "checkpoint"}
    assert fastest_whole([seed, plain], graph, simulator, BITWISE, None).details == {"taken_from": "plain"}
    assert fastest_whole([plain], graph, simulator, BITWISE, 1) is None
    kept = Allowed(recompute=False)
    assert fastest_whole([seed], graph, simulator, kept, None) is None
    for other in (replace(plain, fidelity="lossy"), replace(plain, sub_batches=2, fidelity="bitwise")):
        assert not BITWISE.admits(other, graph)
    nonsense = replace(plain, decisions=(Decision(10_000, "dense"),))
    with pytest.raises(PlanError):
        simulator.run(nonsense)
    assert fastest_whole([nonsense], graph, simulator, BITWISE, None) is None


def test_algorithms_are_chosen_only_where_the_hardware_can_be_told():
    graph = of_zoo("alexnet", 32, 224)
    for device, chosen in (("titanx", True), ("h200", False)):
        costs = cost_table(graph, hardware(device))
        told = hardware(device).tells_algorithms
        assert told is chosen
        seeds = [POLICIES["vdnn-all"](graph, costs)]
        plan = optimal(graph, costs, None, seeds=seeds, time_limit_s=2)
        assert any(c.algorithm for c in plan.choices) is chosen
        assert plan.details["algorithms"] is chosen
    assert Hardware.from_json(hardware("titanx").to_json()) == hardware("titanx")


@pytest.mark.parametrize("name", ["resnet18", "alexnet"])
def test_the_least_peak_that_is_named_can_be_planned_for(name):
    graph = of_zoo(name)
    costs = cost_table(graph, hardware("h200"))
    with pytest.raises(BudgetError) as refused:
        optimal(graph, costs, 1, time_limit_s=3)
    least = refused.value.least_bytes["bitwise"]
    plan = optimal(graph, costs, least, time_limit_s=3)
    assert isinstance(plan, Plan) and plan.lower_bound_bytes <= plan.peak_bytes <= least
