"""A network and its steps, for the tests of specialised calls (:mod:`gistkit.runtime.calls`)."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.nn import norm
from gistkit.runtime.forward import state
from gistkit.runtime.rebuild import arithmetic
from tests.support.nn_cases import same_bits


class Net(nn.Module):
    """Convolutions with and without a bias, two residual blocks, a pool."""

    def __init__(self):
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=i == 1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.relu, self.pool, self.head = nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.relu(self.first(self.stem(x))))
        for i in (0, 2):
            y = self.convs[i + 1](self.relu(self.norms[i](self.convs[i](x))))
            x = self.relu(self.norms[i + 1](y) + x)
        return self.head(x.mean((2, 3)))


@pytest.fixture(params=["shared values", "own nodes", "by kernel"])
def compressed_and_plain(request, monkeypatch):
    """A compressed network, with PyTorch's nodes, gistkit's, or rebuilds by kernel as on a GPU, and its plain copy."""
    if request.param == "own nodes":
        monkeypatch.setattr(state.ForwardState, "has_room", lambda *_: False)
    if request.param == "by kernel":
        monkeypatch.setattr(arithmetic, "rebuild_candidates", lambda x: list(norm.KERNEL_CANDIDATES))
    torch.manual_seed(0)
    plain = Net()
    return gistkit.compress(copy.deepcopy(plain)), plain


def image(batch=4, size=16, seed=0):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def step(model, x=None):
    """Loss, gradients and buffers of a step that moves the parameters."""
    x = image() if x is None else x
    model.zero_grad()
    loss = F.cross_entropy(model(x), torch.arange(x.shape[0]) % 5)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def both(models, *args):
    """The step of both, which must agree."""
    ours, plain = (step(model, *args) for model in models)
    assert len(ours) == len(plain) and all(same_bits(a, b) for a, b in zip(ours, plain, strict=True))


def settle(models, steps=7):
    for seed in range(steps):
        both(models, image(seed=seed))


def shift(model):
    with torch.no_grad():
        model.norms[2].weight.mul_(1.5)
        model.norms[2].bias.add_(0.5)
