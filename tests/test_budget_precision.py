"""Budgets kept to the byte in bf16, fp16 and under autocast."""


import pytest
import torch
from torch import nn

import gistkit
from tests.peaks import peaks_of

LAST = torch.channels_last


class Residual(nn.Module):
    """relu(BN(x) + BN(y)) and relu(BN(x) + x), whose outputs two convolutions read."""

    def __init__(self, features=16):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(i, features, 3, padding=1) for i in (3, *[features] * 3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(features) for _ in range(4))

    def forward(self, x):
        x = torch.relu(self.norms[0](self.convs[0](x)))
        y = self.convs[1](x)
        y = torch.relu(self.norms[1](y) + x)
        z = torch.relu(self.norms[2](self.convs[2](y)) + self.norms[3](y))
        return self.convs[3](z).sum()


def turned(x):
    """The maps turned, which is neither contiguous nor channels_last to a batch norm."""
    return x.transpose(2, 3)


@pytest.mark.parametrize("stats", ["float32", "its own"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rebuilds_in_low_precision_keep_the_plan_to_the_byte(dtype, layout, stats):
    """PyTorch's operators make fp32 copies there: of blocks of a tensor, which the plan counts."""
    torch.manual_seed(0)
    model, x = Residual().to(dtype), torch.randn(4, 3, 20, 20).to(dtype)
    if stats == "float32":
        for norm in model.norms:
            norm.float()
    if layout == "channels_last":
        model, x = model.to(memory_format=LAST), x.contiguous(memory_format=LAST)
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, budget=1)
    least = refused.value.least_bytes["bitwise"]
    for policy, budget in (("optimal", least), ("gist", None)):
        plan = gistkit.plan(model, x, policy=policy, budget=budget)
        if policy == "gist":
            assert any(d.codec == "rebuild" for d in plan.decisions), [d.codec for d in plan.decisions]
        peaks = peaks_of(model, plan, x)
        assert 0.98 * plan.peak_bytes <= peaks[1] <= max(peaks) <= plan.peak_bytes, policy
