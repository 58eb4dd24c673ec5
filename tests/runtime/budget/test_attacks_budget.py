"""Budgets under unusual networks: every live byte of real steps on the CPU against what the plan promised."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gistkit
from gistkit.errors import BudgetError
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.stash.stash import Shape
from tests.support.peaks import held_step
from tests.support.unchecked import unchecked_peak


def conv(inputs, outputs, kernel=3, **words):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **words)


class Checkpointed(nn.Module):
    """Layers under PyTorch's own checkpoint."""

    def __init__(self, *layers, reentrant=False):
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(*layers), reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


class LeadsNowhere(nn.Module):
    """A branch whose result is there until the forward ends and is not part of it; what it saved goes with it."""

    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = conv(3, 8), nn.Sequential(nn.Sigmoid(), nn.Tanh()), conv(8, 8)

    def forward(self, x):
        x = self.first(x)
        beside = self.branch(x)
        return torch.sigmoid(self.last(x)) if beside.dim() == 4 else beside


def checkpointed(reentrant):
    # its input is kept as a codec's payload or made anew: checkpoint unpacks it, and its second forward holds it
    within = conv(8, 8), nn.ReLU(), conv(8, 8), nn.Sigmoid(), conv(8, 8), nn.ReLU()
    return conv(3, 8), nn.ReLU(), Checkpointed(*within, reentrant=reentrant), conv(8, 8), nn.ReLU(), conv(8, 8)


def head():
    return nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)


NETS = {
    "gelu": lambda: (conv(3, 8), nn.GELU(), nn.LayerNorm(12), conv(8, 8), nn.GELU(), conv(8, 8)),
    "silu in place": lambda: (conv(3, 8), nn.SiLU(True), conv(8, 8), nn.SiLU(True), conv(8, 8)),
    "depthwise": lambda: (conv(3, 9, groups=3), nn.BatchNorm2d(9), nn.ReLU6(), conv(9, 9, groups=9), conv(9, 8, 1)),
    "in place on a view": lambda: (
        conv(3, 8),
        nn.InstanceNorm2d(8),
        nn.ReLU(True),
        conv(8, 8),
        nn.ReLU(True),
        conv(8, 8),
    ),
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "leads nowhere": lambda: (LeadsNowhere(), conv(8, 8)),
    "average pools": lambda: (conv(3, 8), nn.AvgPool2d(3, 1, 1), nn.Sigmoid(), nn.AvgPool2d(3, 1, 1), conv(8, 8)),
}


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 12, 12, generator=generator), torch.arange(4)


def net(name):
    torch.manual_seed(0)
    return nn.Sequential(*NETS[name](), *head()).train()


def planned(model, budget=None):
    return gistkit.plan(model, *batch(), loss_fn=F.cross_entropy, budget=budget)


def least(model):
    with pytest.raises(BudgetError) as refused:
        planned(model, 1)
    return refused.value.least_bytes["bitwise"]


def steps(model, count=2):
    """(loss and gradients of the last step, peaks of live bytes) of some steps, gradients none at first."""
    x, y = batch()
    peaks = []
    for _ in range(count):
        torch.manual_seed(3)
        model.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            live.track(model, x, y)
            loss = held_step(model, F.cross_entropy, x, y)
        peaks.append(live.peak_bytes)
    return [loss, *(p.grad for p in model.parameters())], peaks


@pytest.mark.parametrize("name", NETS)
def test_the_plain_step_is_predicted_to_the_byte(name):
    model = net(name)
    assert planned(model).prediction.plain_peak_bytes == steps(copy.deepcopy(model))[1][-1]


@pytest.mark.parametrize("name", NETS)
def test_the_least_budget_is_kept(name):
    model = net(name)
    made = planned(model, least(model))
    expected, _ = steps(copy.deepcopy(model))
    got, peaks = steps(gistkit.compress(model, made))
    assert max(peaks) <= made.peak_bytes <= made.budget_bytes
    assert peaks[-1] == unchecked_peak(made, model, *batch(), loss_fn=F.cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    "loss_fn", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss, lambda y, t: F.binary_cross_entropy(y.sigmoid(), t)]
)
def test_a_loss_of_every_element_stays_behind_its_mean(loss_fn):
    # the scalar's storage is that of the losses that it is the mean of: beside a small net most of the step
    torch.manual_seed(0)
    model, x, y = nn.Linear(1, 500), torch.randn(50, 1), torch.rand(50, 500)
    made = gistkit.plan(model, x, y, loss_fn=loss_fn)
    with LiveBytes() as live:
        live.track(model, x, y)
        held_step(model, loss_fn, x, y)
    assert made.prediction.plain_peak_bytes == live.peak_bytes


def images():
    """4-D and 5-D inputs of pools in all kinds of strides."""
    x, last = torch.randn(3, 4, 10, 8), torch.channels_last
    yield from (x, x.contiguous(memory_format=last), x.transpose(2, 3), x[:, :, 1:-1, 1:-1], x.permute(1, 0, 2, 3))
    yield from (x.contiguous(memory_format=last)[:, 1:3], x.contiguous(memory_format=last)[:, :, 1:-1], x[:, :1], x[0])
    x, last = torch.randn(2, 3, 6, 6, 6), torch.channels_last_3d
    yield from (x, x.contiguous(memory_format=last), x.contiguous(memory_format=last)[:, 1:], x.transpose(2, 3))


POOLS = {
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1) if x.dim() < 5 else F.avg_pool3d(x, 3, 2, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2) if x.dim() < 5 else F.adaptive_avg_pool3d(x, 2),
    "maximum": lambda x: torch.max_pool2d(x, 2) if x.dim() < 5 else F.max_pool3d(x, 2),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_take_a_stand_in_without_memory_for_their_input(name):
    def gradient(x, pack, unpack):
        x = x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = POOLS[name](x)
        return torch.autograd.grad(y, x, torch.arange(y.numel(), dtype=y.dtype).view(y.shape))[0]

    sizes = []

    def stand_in(kept):
        if not isinstance(kept, Shape):
            return kept
        made = kept.dense()
        sizes.append(made.untyped_storage().nbytes())
        return made

    for x in images():
        expected = gradient(x, lambda t: t, lambda t: t)
        got = gradient(x, lambda t: Shape(t) if t.is_floating_point() else t, stand_in)
        assert torch.equal(got, expected) and got.stride() == expected.stride()
    assert sizes == [0] * len(list(images()))
