"""A small network of which a part may be scripted, traced, a graph; its plans, bits and peak."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.peaks import held_step, peaks_of_steps
from tests.support.planning_cases import T, X


def made(part=lambda module: module, middle=()):
    torch.manual_seed(0)
    middle = part(nn.Sequential(*(middle or (nn.BatchNorm2d(8), nn.ReLU()))))
    layers = nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), middle, *layers)


def traced(module, channels=8):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # a batch norm looks at its sizes
        return torch.jit.trace(module, torch.randn(len(X), channels, *X.shape[2:]), check_trace=False)


def plan(model, **words):
    return gistkit.plan(model, X, T, loss_fn=F.cross_entropy, **words)


def assert_same(plain, twin, steps=3):
    for _ in range(steps):
        for model in (plain, twin):
            model.zero_grad()
        assert torch.equal(*(held_step(model, F.cross_entropy, X, T) for model in (plain, twin)))
        pairs = zip((*plain.parameters(), *plain.buffers()), (*twin.parameters(), *twin.buffers()), strict=True)
        assert all(torch.equal(a, b) and (a.grad is None or torch.equal(a.grad, b.grad)) for a, b in pairs)


def peak(model):
    return max(peaks_of_steps(model, lambda: held_step(model, F.cross_entropy, X, T), X, T))
