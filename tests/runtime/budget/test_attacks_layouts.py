"""Attacks on budgets: images and volumes in channels_last, whose batch norms are rebuilt in it too."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gistkit
from tests.runtime.budget.test_attacks_parts import least_plan, loss_fn
from tests.support.peaks import held_step, peaks_of_steps


class Volumes(nn.Module):
    def __init__(self, conv, norm):
        super().__init__()
        self.first, self.norm = conv(3, 8, 3, padding=1), norm(8)
        self.last = nn.Sequential(conv(8, 3, 3, padding=1), conv(3, 3, 3, padding=1))

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def run(model, plan, x, targets):
    """(gradients, peaks) of two steps under a plan, as a loop takes them that holds the model's output."""
    twin = gistkit.compress(copy.deepcopy(model), plan)
    peaks = peaks_of_steps(twin, lambda: held_step(twin, loss_fn, x, targets), x, targets)
    return [p.grad for p in twin.parameters()], peaks


@pytest.mark.parametrize("dims", [2, 3])
def test_rebuilds_in_channels_last_keep_the_least_budget(dims):
    torch.manual_seed(0)
    layout: dict[str, Any] = {"memory_format": torch.channels_last_3d if dims == 3 else torch.channels_last}
    kinds = (nn.Conv3d, nn.BatchNorm3d) if dims == 3 else (nn.Conv2d, nn.BatchNorm2d)
    model, x = Volumes(*kinds).to(**layout), torch.randn(4, 3, *(8, 16, 16)[-dims:]).contiguous(**layout)
    least, targets = least_plan(model, x, torch.zeros(4)), torch.zeros(4)
    rebuilt = gistkit.plan(model, x, targets, loss_fn=loss_fn, policy="gist")
    rebuilt = gistkit.plan(model, x, targets, loss_fn=loss_fn, policy="gist", budget=rebuilt.peak_bytes)
    assert "rebuild" in {d.codec for d in rebuilt.decisions}
    for plan in (least, rebuilt):
        grads, peaks = run(model, plan, x, targets)
        assert plan.peak_bytes == plan.budget_bytes
        # a rebuild's two factors of 8 channels are gone by the convolution that a plan counts them in
        assert all(plan.peak_bytes - 64 <= peak <= plan.peak_bytes for peak in peaks)
    twin = copy.deepcopy(model)
    loss_fn(twin(x), None).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(grads, twin.parameters(), strict=True))
