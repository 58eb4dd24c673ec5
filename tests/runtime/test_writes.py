"""Activations that somebody writes to between forward and backward."""

import copy

import pytest
import torch
from torch import nn

import gistkit


class Shows(nn.Module):
    """Puts the activation that its head reads where somebody can write to it; not in the step that is planned."""

    def __init__(self):
        super().__init__()
        self.shown = None
        self.first, self.head = nn.Linear(64, 2048), nn.Linear(2048, 2)

    def forward(self, x):
        y = torch.relu(self.first(x))
        if self.shown is not None:
            self.shown.append(y.detach())
        return self.head(y)


def gradients(model, overwrite):
    model.zero_grad(set_to_none=True)
    model.shown = [] if overwrite else None
    out = model(torch.linspace(-1, 1, 256).view(4, 64))
    for y in model.shown or ():
        y.mul_(3)
    out.square().sum().backward()
    return [p.grad for p in model.parameters()]


def test_a_stash_goes_on_with_the_values_that_forward_read_where_pytorch_raises():
    torch.manual_seed(0)
    model = Shows()
    want = gradients(model, False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, True)
    small = gistkit.compress(copy.deepcopy(model))
    gradients(small, False)
    found = gradients(small, True)
    assert {"zvc", "mask1"} & {row.codec for row in gistkit.report(small).stats.rows}
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
