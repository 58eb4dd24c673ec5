"""Attacks on budgets: a dropout as large as the step's largest tensors, whose noise is there before its bits are."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.live import LiveBytes


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
    twin, peaks = gistkit.compress(copy.deepcopy(model), plan), []
    for _ in range(2):
        twin.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes(timeline=False) as live:
            live.track(twin, x)
            twin(x).backward()
        peaks.append(live.peak_bytes)
    # the first call of a dropout with that share computes its scale from a tensor of one element
    assert peaks[1] == plan.peak_bytes and peaks[0] <= plan.peak_bytes + 4
