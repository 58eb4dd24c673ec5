"""What a steady step costs the host, in Python calls of all threads: next to nothing where nothing is gained."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.zoo.resnet import BasicBlock, ResNet
from tests.support.graphs import Apply
from tests.support.models import chain, gated_chain

STEADY = 12
"""Steps after which densities are not counted in the next one."""


def small_vit():
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, activation="gelu", batch_first=True)
    layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    forward = lambda m, x: m[2](m[1](m[0](x).flatten(2).transpose(1, 2)).mean(1))  # noqa: E731
    return Apply(forward, nn.Conv2d(3, 64, 8, 8), layers, nn.Linear(64, 10))


def python_calls(step):
    """Calls of Python functions and built-in ones in one step, in whatever thread."""
    count = 0

    def profiler(_frame, event, _arg):
        nonlocal count
        count += event in ("call", "c_call")

    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


def calls_of_a_steady_step(model):
    x, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))

    def step():
        F.cross_entropy(model(x), labels).backward()

    for _ in range(STEADY):
        step()
    return python_calls(step)


@pytest.mark.parametrize(
    ("make", "most"),
    [(small_vit, 1.05), (lambda: ResNet(BasicBlock, (1, 1, 1, 1), 10), 8.0)],
    ids=["nothing gained", "four blocks of ResNet-18"],
)
def test_python_calls_of_a_steady_step(make, most):
    plain = calls_of_a_steady_step(make().train())
    own = calls_of_a_steady_step(gistkit.compress(make().train()))
    assert own <= most * plain


@pytest.mark.parametrize(("make", "most"), [(chain, 70), (gated_chain, 80)], ids=["rebuilt", "rebuilt and gated"])
def test_calls_that_one_encoding_adds(make, most):
    """On a CPU 27 of them are backward's, which computes the output by PyTorch's operators."""
    extra = [
        calls_of_a_steady_step(gistkit.compress(make(n), min_gain=0)) - calls_of_a_steady_step(make(n)) for n in (6, 16)
    ]
    assert (extra[1] - extra[0]) / 10 <= most


class Mlps(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_python_calls_of_tasks_that_run_anew():
    x, t = torch.randn(8, 16, 64), torch.randn(8, 16, 64)
    model, counts = Mlps(), {}
    for policy in ("gist", "checkpoint"):  # nothing, and four blocks of five calls anew
        plan = gistkit.plan(model, x, t, loss_fn=F.mse_loss, policy=policy)
        gistkit.compress(model, plan)
        for _ in range(3):
            gistkit.step(model, F.mse_loss, x, t)
        counts[policy] = python_calls(lambda: gistkit.step(model, F.mse_loss, x, t))
        gistkit.restore(model)
    again = sum(d.codec == "recompute" for d in plan.decisions)
    assert counts["checkpoint"] <= counts["gist"] + 125 * again, (counts, again)
