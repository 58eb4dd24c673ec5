"""gistkit.GraphedStep without a GPU, where every call is a step; tests/gpu/test_cuda_graphs.py has the graphs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gistkit
from gistkit.runtime.step.graphed import WARM_UP

X, TARGETS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).train()


def test_on_a_cpu_every_call_is_a_step():
    model = gistkit.compress(network())
    twin = copy.deepcopy(network())
    step = gistkit.GraphedStep(model, F.cross_entropy, sub_batches=2)
    for _ in range(WARM_UP + 3):
        model.zero_grad()
        twin.zero_grad()
        found = step(X, TARGETS)
        expected = gistkit.step(twin, F.cross_entropy, X, TARGETS, sub_batches=2)
        assert torch.equal(found, expected) and step.graph_bytes == 0
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, twin)]
        assert len(grads[0]) == 4 and all(map(torch.equal, *grads))


def test_own_losses_are_compared_in_the_warm_up():
    step = gistkit.GraphedStep(network(), lambda out, t: F.cross_entropy(out, t) ** 2, sub_batches=2)
    with pytest.raises(ValueError, match="must return the mean over its rows"):
        step(X, TARGETS)


@pytest.mark.parametrize(
    ("words", "error", "why"),
    [
        ({"model": 1}, TypeError, "GraphedStep: model must be a torch.nn.Module, got int"),
        ({"loss_fn": 1}, TypeError, r"GraphedStep: loss_fn must be callable, got int; the order is GraphedStep\("),
        ({"warm_up": 1}, ValueError, "warm_up must be an int of at least 4, .* got 1; leave it out"),
        ({"sub_batches": 0}, ValueError, "GraphedStep: sub_batches must be None"),
        ({"verify": 1}, TypeError, "GraphedStep: verify must be True or False"),
    ],
)
def test_arguments_that_make_no_sense(words, error, why):
    words = {"model": network(), "loss_fn": F.cross_entropy, **words}
    with pytest.raises(error, match=why):
        gistkit.GraphedStep(words.pop("model"), words.pop("loss_fn"), **words)


def test_a_distributed_model_is_refused():
    model = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(TypeError, match="must be no DistributedDataParallel"):
        gistkit.GraphedStep(model, F.cross_entropy)
