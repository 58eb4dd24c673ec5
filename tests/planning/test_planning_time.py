"""What keeps planning within its limits: less is looked at, and nothing is collected meanwhile."""

import gc

import pytest
import torch

import gistkit
from gistkit import zoo
from gistkit.api import planning
from gistkit.errors import BudgetError
from gistkit.ir.uncollected import uncollected
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.options import UNCUT, slice_counts
from gistkit.planning.policies.optimal import planning as optimal_planning
from gistkit.planning.policies.optimal.optimal import minimise_peak, optimal
from gistkit.planning.policies.registry import POLICIES
from tests.support.zoo_steps import of_zoo


@pytest.fixture(scope="module")
def resnet():
    graph = of_zoo("resnet18", 8)
    return graph, cost_table(graph, hardware("h200"))


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_put_back_as_it_was(on):
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(KeyError), uncollected(), uncollected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is on
    finally:
        (gc.enable if before else gc.disable)()


def test_plans_and_refusals_leave_the_collector_on(monkeypatch):
    seen, made = [], planning.by_name
    monkeypatch.setattr(planning, "by_name", lambda *given: (seen.append(gc.isenabled()), made(*given))[1])
    x = torch.empty(4, 3, 32, 32, device="meta")
    with torch.device("meta"):
        model = zoo.nin(num_classes=10, image_size=32)
    gistkit.plan(model, x, hardware="h200")
    assert gc.isenabled()
    with pytest.raises(BudgetError):
        gistkit.plan(model, x, hardware="h200", budget=1)
    assert gc.isenabled() and seen == [False, False]


def test_nothing_is_searched_for_where_nothing_fits_for_sure(resnet, monkeypatch):
    def search(*given, **words):
        raise AssertionError("a search that can find nothing")

    monkeypatch.setattr(optimal_planning.Planning, "_fastest", search)
    with pytest.raises(BudgetError) as refused:
        optimal(*resnet, 1)
    assert refused.value.least_bytes["bitwise"] > 1
    with pytest.raises(AssertionError, match="find nothing"):
        optimal(*resnet, refused.value.least_bytes["bitwise"])


def test_a_step_of_very_many_storages_has_no_slices(resnet, monkeypatch):
    """Then a network that is not cut has no more moves than the bitwise class, and is planned once."""
    assert slice_counts("reassociated", UNCUT) != (1,) == slice_counts("reassociated", UNCUT + 1)
    plain, least = POLICIES["plain"](*resnet).peak_bytes, minimise_peak(*resnet).peak_bytes
    planned, begin = [], optimal_planning.Planning.__init__

    def noted(planning, graph, costs, allowed, *given, **words):
        planned.append(allowed.fidelity)
        begin(planning, graph, costs, allowed, *given, **words)

    monkeypatch.setattr(optimal_planning.Planning, "__init__", noted)
    words = {"fidelity": "reassociated", "time_limit_s": 0.5}
    optimal(*resnet, (plain + least) // 2, **words)
    assert planned == ["bitwise", "reassociated"]
    planned.clear()
    monkeypatch.setitem(slice_counts.__globals__, "UNCUT", 0)
    uncut = optimal(*resnet, (plain + least) // 2, **words)
    assert planned == ["reassociated"]
    assert uncut.fidelity == "bitwise" and all(c.weight_grad_slices == 1 for c in uncut.choices)
