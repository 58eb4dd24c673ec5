"""Segments that run anew over random numbers, custom Functions and what is saved and goes again at once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.stash.verify import same_bits
from tests.support.models import Call
from tests.support.peaks import least_plan


class Square(torch.autograd.Function):
    """Saves its input while the region's function mode is on."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Between(torch.autograd.Function):
    """Saves what it makes on the way."""

    @staticmethod
    def forward(ctx, x):
        a = x.tanh()
        ctx.save_for_backward(a, torch.bernoulli(a.abs()))
        return (a * ctx.to_save[1]).relu()

    @staticmethod
    def backward(ctx, grad):
        a, kept = ctx.saved_tensors
        return grad * kept * (1 - a * a) * (a * kept > 0)


GENERATOR = torch.Generator()
RANDOM = [
    F.dropout,
    F.dropout2d,
    lambda x: F.alpha_dropout(x, 0.3, True),
    lambda x: F.feature_alpha_dropout(x, 0.3, True),
    lambda x: F.rrelu(x, training=True),
    lambda x: x * torch.bernoulli(torch.sigmoid(x).detach()),
    lambda x: x + torch.rand_like(x),
    lambda x: x * torch.empty_like(x).uniform_(),
    lambda x: x[:, torch.randperm(x.shape[1])],
    lambda x: F.gumbel_softmax(x, dim=1),
    lambda x: x * torch.randn(x.shape, generator=GENERATOR),
    lambda x: x * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)),
]


def network(*layers):
    torch.manual_seed(0)
    made = [nn.Conv2d(3, 8, 3, padding=1), nn.SELU(), nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid(), *layers]
    made += [nn.Conv2d(8, 8, 3, padding=1), nn.SELU(), *layers, nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.SELU()]
    return nn.Sequential(*made, nn.Conv2d(8, 8, 3, padding=1), nn.SELU(), nn.Flatten(), nn.Linear(1152, 5))


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 3, 12, 12, generator=generator), torch.arange(4)


def results(model, steps=2):
    found = []
    GENERATOR.manual_seed(1)
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad(set_to_none=True)
        with gistkit.LiveBytes():  # which asks tensors between the calls
            found.append(gistkit.step(model, F.cross_entropy, *batch()))
        found += [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return found


def assert_carried_out(model, **words):
    """The plan runs under a budget, so every decision of it, and gives plain PyTorch's bits. The plan."""
    x, y = batch()
    made = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, **words)
    found = results(gistkit.compress(copy.deepcopy(model), made))
    assert all(same_bits(a, b) for a, b in zip(results(copy.deepcopy(model)), found, strict=True))
    return made


@pytest.mark.parametrize("kinds", [RANDOM[0::3], RANDOM[1::3], RANDOM[2::3], (Square.apply, Between.apply)])
def test_random_calls_and_custom_functions_in_a_segment(kinds):
    """They draw the same numbers again."""
    made = assert_carried_out(network(*map(Call, kinds)), policy="checkpoint", budget="95%")
    assert sum(d.codec == "recompute" for d in made.decisions) >= 3


def test_running_statistics_are_written_once():
    norms = nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.BatchNorm2d(8)
    assert_carried_out(network(*norms), policy="checkpoint", budget="100%")


def loss(y, _):
    return y.square().mean()


def test_the_least_lossy_budget_is_planned_without_it():
    layers = (nn.Conv2d(8, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.Hardswish(inplace=True), nn.Conv2d(8, 8, 3))
    model, x, y = nn.Sequential(*layers), torch.randn(6, 8, 24, 24), torch.zeros(6)
    plan = least_plan(model, x, y, loss_fn=loss, lossy="fp8")
    gistkit.step(gistkit.compress(copy.deepcopy(model), plan), loss, x, y, verify=False)  # for which it has no room
