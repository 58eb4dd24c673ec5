"""Ways of use that once broke the promise that a compressed model is plain PyTorch, bit for bit."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from gistkit.runtime.rebuild import same_bits


def network(channels=16):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1),
    )


def images(batch=4):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def assert_same_gradients(model, run, steps=1):
    """``run(model, step)`` gives a loss; after each step the gradients of a compressed copy are the model's own."""
    twin = gistkit.compress(copy.deepcopy(model))
    for step in range(steps):
        for m in (model, twin):
            m.zero_grad()
            torch.manual_seed(step)
            run(m, step).backward()
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), (step, name)
            assert a.grad is None or same_bits(a.grad, b.grad), (step, name)
    return twin


def test_two_forwards_in_one_autocast_region_share_the_casts_of_weights():
    def run(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            return model(images()).float().sum() + model(images() * 2).float().mean()

    assert_same_gradients(network(), run, steps=2)


class OwnRegions(nn.Module):
    """Uses a weight in two autocast regions of its own."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        for weight in (self.stem, self.conv, self.conv):
            with torch.autocast("cpu", torch.bfloat16):
                x = torch.relu(weight(x)).float()
        return x


def test_casts_of_weights_end_with_an_autocast_region_inside_the_forward():
    assert_same_gradients(OwnRegions(), lambda model, step: model(images()).sum(), steps=2)


@pytest.mark.parametrize(
    "layer", [nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 16, 3), nn.BatchNorm2d(3), nn.Linear(32, 4)]
)
def test_a_gradient_penalty_is_refused_and_no_constant(layer):
    # the gradient that comes in is that of a sum: it requires none itself
    model, x = gistkit.compress(nn.Sequential(layer)), images().requires_grad_()
    for scaled in (model(x).sum(), (2 * model(x)).sum()):
        (grad,) = torch.autograd.grad(scaled, x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiate twice .* call gistkit\.restore\(model\)"):
            (1 + grad.norm()).backward()
        (grad,) = torch.autograd.grad(scaled, x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiate twice .* call gistkit\.restore\(model\)"):
            torch.autograd.grad(grad.norm(), x, allow_unused=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.functional.hessian(lambda t: model(t).sum() ** 2, torch.rand(1, 3, 4, 32))
    x.grad = None
    model(x).sum().backward()
    assert not x.grad.requires_grad
