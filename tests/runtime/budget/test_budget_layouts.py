"""Budgets kept to the byte where gradients arrive in another layout than what backward keeps of the forward.

A 1x1 convolution whose weight is channels_last hands a channels_last gradient to layers that ran contiguous, as does a
sum one whose strides are all 0. At the least budget nothing fits beside the gradient and one result.
"""

import copy

import pytest
import torch
from torch import nn

import gistkit
from tests.support.peaks import least_bytes, peaks_of

LAST = torch.channels_last


def conv(kernel=3, features=8, last=False, **how):
    made = nn.Conv2d(8, features, kernel, padding=kernel // 2, **how)
    return made.to(memory_format=LAST) if last else made


def point(last=True):
    return conv(1, 8, last)


NETS = {
    "a ReLU": lambda: [conv(), nn.ReLU(), conv(1), nn.ReLU(), point()],
    "a ReLU in place": lambda: [conv(), nn.ReLU(inplace=True), conv(), nn.ReLU(inplace=True), point()],
    "a batch norm": lambda: [conv(), nn.BatchNorm2d(8), nn.ReLU(), point(), nn.BatchNorm2d(8), nn.ReLU(), conv(1)],
    "a dropout": lambda: [conv(), nn.ReLU(), nn.Dropout(0.4), point()],
    "a dropout before the sum": lambda: [conv(last=True), nn.Dropout(0.4)],
    "a pool": lambda: [conv(), nn.ReLU(), nn.MaxPool2d(2), point(), nn.ReLU(), nn.MaxPool2d(3, 1, 1), point()],
    "ReLUs without gradients": lambda: [nn.ReLU(), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1)],
    "small maps, channels_last": lambda: [point(), nn.ReLU(), conv(1), nn.ReLU(), conv(1, 4)],
}


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).sum()


@pytest.mark.parametrize(("name", "last"), [(name, bool(i % 2)) for i, name in enumerate(NETS)])
def test_the_least_budget_is_kept_to_the_byte(name, last):
    torch.manual_seed(0)
    model, x = Net(NETS[name]()), torch.randn(4, 8, 16, 16)
    x = x.contiguous(memory_format=LAST) if last else x
    recorded = gistkit.capture(copy.deepcopy(model), (x,), fake=False)
    density = {s.id: s.density for s in recorded.storages if s.density is not None}
    if "dropout" in name:  # which draws other zeros at every step
        density = 1.0
    least = least_bytes(model, x, density=density)
    plan = gistkit.plan(model, x, budget=least, density=density)
    peaks = peaks_of(model, plan, x)
    assert max(peaks) <= plan.peak_bytes <= least
    # what comparing bits takes at the first use is in the plan, and rounded up
    compared = any(d.codec in ("rebuild", "recompute") for d in plan.decisions)
    assert plan.peak_bytes == peaks[1] or (compared and plan.peak_bytes <= 1.01 * peaks[1])
