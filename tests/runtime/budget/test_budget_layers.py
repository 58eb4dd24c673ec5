"""A budget kept to the byte for one kind of layer after the other, each between convolutions, at the least budget."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from tests.support.peaks import peaks_of
from tests.support.unchecked import unchecked_peak


def conv(features=8, kernel=3, **how):
    return nn.Conv2d(8, features, kernel, padding=kernel // 2, **how)


LAYERS = {
    "overlapping pools": lambda: [conv(), nn.ReLU(), nn.MaxPool2d(3, 2, 1), conv(), nn.ReLU(), nn.MaxPool2d(5, 1, 2)],
    "adaptive pools": lambda: [conv(), nn.ReLU(), nn.AdaptiveMaxPool2d(9), conv(), nn.AdaptiveAvgPool2d(4)],
    "average pools": lambda: [conv(), nn.ReLU(), nn.AvgPool2d(3, 2, 1)],
    "batch norms": lambda: [conv(), nn.BatchNorm2d(8), nn.ReLU(), conv(), nn.BatchNorm2d(8), nn.ReLU(inplace=True)],
    "group and instance norms": lambda: [conv(), nn.GroupNorm(2, 8), nn.ReLU(), conv(), nn.InstanceNorm2d(8)],
    "local response norms": lambda: [conv(), nn.ReLU(), nn.LocalResponseNorm(3)],
    "smooth activations": lambda: [conv(), nn.SiLU(), conv(), nn.GELU(), conv(), nn.Sigmoid(), conv(), nn.Softplus()],
    "clipped activations": lambda: [conv(), nn.ReLU6(), conv(), nn.Hardswish(), conv(), nn.LeakyReLU(), conv()],
    "activations in place": lambda: [conv(), nn.ReLU6(True), conv(), nn.Hardswish(True), conv(), nn.ELU(inplace=True)],
    "depthwise": lambda: [conv(groups=8), nn.BatchNorm2d(8), nn.ReLU(), conv(kernel=1), nn.ReLU()],
    "transposed": lambda: [nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU()],
    "dilated and strided": lambda: [nn.Conv2d(8, 8, 3, 2, 2, 2), nn.ReLU()],
    "upsampled": lambda: [conv(), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear")],
    "frozen": lambda: [conv().requires_grad_(False), nn.ReLU(), conv(), nn.ReLU(), conv().requires_grad_(False)],
    "bf16": lambda: [conv().bfloat16(), nn.BatchNorm2d(8).bfloat16(), nn.ReLU(), nn.MaxPool2d(2)],
}


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, dtype = nn.Sequential(*layers), next(layers[0].parameters()).dtype
        self.last = nn.Conv2d(8, 4, 1).to(dtype)

    def forward(self, x):
        return self.last(self.layers(x.to(self.last.weight.dtype))).float().square().mean()


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_the_least_budget_is_kept_to_the_byte(name):
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    model, x = Net(LAYERS[name]()), torch.randn(4, 8, 24, 24)
    recorded = gistkit.capture(copy.deepcopy(model), (x,), fake=False)
    density = {s.id: s.density for s in recorded.storages if s.density is not None}
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, budget=1, density=density)
    least = refused.value.least_bytes["bitwise"]
    plan = gistkit.plan(model, x, budget=least, density=density)
    peaks = peaks_of(model, plan, x)
    assert plan.peak_bytes <= least
    assert max(peaks) <= plan.peak_bytes
    assert peaks[1] in (plan.peak_bytes, unchecked_peak(plan, model, x, density=density))
