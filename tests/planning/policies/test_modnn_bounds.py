"""moDNN's least memory: no plan is below it, none that fits is refused, and batch norms see their batch."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gistkit
from gistkit.errors import BudgetError
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.modnn.bounds import lower_bound
from gistkit.planning.policies.modnn.modnn import modnn
from gistkit.planning.policies.modnn.parts import least_bytes, parts_of
from gistkit.planning.policies.registry import POLICIES
from tests.support.modnn_cases import FAST_LINK, budget_between
from tests.support.step_graphs import step_graphs

DEVICES = (FAST_LINK, PRESETS["cpu"])


@cache
def heavy(width=256):
    """A linear with more weights than a batch of 4 has activations: summed, its gradient costs more than whole maps."""
    linear, ones = torch.nn.Linear(64, width), torch.ones(4, width)
    found = gistkit.capture(linear, (torch.randn(4, 64),), backward=True, loss_fn=F.mse_loss, targets=(ones,))
    return replace(found, least_rows=1)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    step_graphs() | st.sampled_from((1, 16, 256)).map(heavy),
    st.floats(0, 1.2),
    st.sampled_from(("bitwise", "reassociated")),
    st.sampled_from(DEVICES),
)
def test_no_plan_of_the_policy_is_below_its_bound(graph, share, fidelity, device):
    """Not with a whole batch either, which may need less than single rows, whose gradients are all there."""
    costs = cost_table(graph, device)
    budget = budget_between(graph, costs, share, fidelity=fidelity)
    plan = modnn(graph, costs, budget, fidelity=fidelity, batch_norm=True)
    assert plan.lower_bound_bytes <= plan.peak_bytes


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("policy", ["modnn", "vdnn+"])
def test_a_whole_batch_may_need_less_than_single_rows(device, policy):
    """Where gradients are not summed none is there before it is made: eq. (2)'s size 1 is not the least then."""
    graph = heavy()
    costs = cost_table(graph, device)
    least = least_bytes(graph, costs)
    assert least["reassociated"] == least["bitwise"] < lower_bound(parts_of(graph, costs)(4)).nbytes
    plan = POLICIES[policy](graph, costs, least["bitwise"])
    assert plan.sub_batches == 1 and plan.peak_bytes == least["bitwise"]
    assert plan.lower_bound_bytes == (least["bitwise"] if policy == "modnn" else 0)


def normed():
    """Convolutions with a batch norm between them, of which each row may be taken alone but for the statistics."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)
    )
    return replace(gistkit.capture(model, (torch.randn(8, 3, 24, 24),), backward=True), least_rows=1)


@pytest.mark.parametrize("policy", ["modnn", "vdnn+"])
def test_batch_norms_see_the_whole_batch_unless_that_is_given_up(policy):
    graph = normed()
    costs = cost_table(graph, FAST_LINK)
    whole, parts = (least_bytes(graph, costs, batch_norm=accepted) for accepted in (False, True))
    assert parts["reassociated"] < parts["bitwise"] == whole["bitwise"] == whole["reassociated"]
    budget = (parts["reassociated"] + parts["bitwise"]) // 2
    assert POLICIES[policy](graph, costs, budget, batch_norm=True).sub_batches > 1
    with pytest.raises(BudgetError, match="or allow sub-batches with batch_statistics='per_sub_batch'") as refused:
        POLICIES[policy](graph, costs, budget)
    assert refused.value.least_bytes == whole
    both = "with fidelity=.reassociated. and batch_statistics='per_sub_batch'"
    with pytest.raises(BudgetError, match=both):
        POLICIES[policy](graph, costs, budget, fidelity="bitwise")
    with pytest.raises(BudgetError, match="no size of sub-batches would do"):
        POLICIES[policy](graph, costs, parts["reassociated"] - 1)
