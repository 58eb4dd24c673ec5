"""Attacks on budgets: a dropout as large as the step's largest tensors, whose noise is there before its bits are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.peaks import peaks_of


class Net(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.first, self.last, self.inplace = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1), inplace

    def forward(self, x):
        x = F.dropout(self.first(x) * 2, 0.3, inplace=self.inplace)
        return self.last(x.mean((2, 3), keepdim=True)).sum()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_large_dropout_keeps_the_least_budget(inplace):
    torch.manual_seed(0)
    model, x = Net(inplace), torch.randn(4, 3, 32, 32)
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, budget=1)
    least = refused.value.least_bytes["bitwise"]
    plan = gistkit.plan(model, x, budget=least)
    peaks = peaks_of(model, plan, x)
    assert peaks == [plan.peak_bytes] * 2


class Kept(nn.Module):
    """The bits of a dropout, or the map of a pool, are made beside the step's largest tensors."""

    def __init__(self, op):
        super().__init__()
        self.first, self.last, self.op = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1), op

    def forward(self, x):
        return self.last(self.op(self.first(x)).mean((2, 3), keepdim=True)).sum()


OPS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "relu": lambda x: F.relu(x),
    "relu and pool": lambda x: F.max_pool2d(F.relu(x), 3, 1, 1),
}


@pytest.mark.parametrize("name", OPS)
def test_the_plan_without_decisions_counts_what_operators_keep_by_themselves(name):
    """Where `plain` fits it competes whole, and the runtime's operators run under it."""
    torch.manual_seed(0)
    model, x = Kept(OPS[name]), torch.randn(4, 3, 32, 32)
    budget = gistkit.plan(model, x, policy="plain").peak_bytes
    try:
        plan = gistkit.plan(model, x, budget=budget)
    except gistkit.BudgetError as refused:  # bits beside the noise: more than PyTorch needs
        assert name == "dropout"
        plan = gistkit.plan(model, x, budget=refused.least_bytes["bitwise"])
    assert max(peaks_of(model, plan, x)) <= plan.peak_bytes
