"""`optimal` against the other policies, segments that run anew, whole plans of others, what a refused budget names."""

import pytest

from bench.optimal import line, rows, wrong
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.optimal import Planning, optimal
from gistkit.planning.policies.registry import POLICIES
from tests.support.step_graphs import chain
from tests.support.zoo_steps import of_zoo

CPU = hardware("cpu")


def test_never_slower_than_a_policy_that_fits():
    name = "nin"
    graph = of_zoo(name, 32)
    found = list(rows(name, graph, cost_table(graph, hardware("h200")), 3))
    assert len(found) == 3
    assert [wrong(row) for row in found] == ["", "", ""]
    assert any(p["fits"] for p in found[-1]["policies"].values())
    assert name in line(found[0])


@pytest.mark.parametrize("fidelity", ["reassociated", "lossy"])
def test_a_wider_class_is_never_slower(fidelity, monkeypatch):
    """Where its larger program finds nothing in its time, the bitwise plan is there."""
    graph, costs = chained()
    budget = int(POLICIES["plain"](graph, costs).peak_bytes * 0.8)
    bitwise = optimal(graph, costs, budget)
    run = Planning.run

    def nothing(planning):
        run(planning)
        planning.plan = planning.plan if planning._allowed.fidelity == "bitwise" else None

    words = {"fidelity": fidelity, "lossy": "fp8" if fidelity == "lossy" else None}
    wide = optimal(graph, costs, budget, **words)
    assert wide.step_s <= bitwise.step_s * (1 + 1e-9)
    monkeypatch.setattr(Planning, "run", nothing)
    taken = optimal(graph, costs, budget, **words)
    assert (taken.step_s, taken.decisions, taken.fidelity) == (bitwise.step_s, bitwise.decisions, "bitwise")
    assert taken.peak_bytes <= budget and taken.details["fidelity"] == fidelity and "taken_from" not in taken.details


def chained(device=CPU):
    """A chain whose maps shrink in none of its layers: segments pay."""
    graph = chain(6, 8, 32, 4)
    return graph, cost_table(graph, device)
