"""Attacks on plans: results that PyTorch returns as views of what it made inside: no ReLU may take their memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.nn_cases import same_bits

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MAKE = {
    "a convolution of one image": lambda m, x: m.conv(x[0]),
    "a transposed convolution of one image": lambda m, x: F.conv_transpose2d(x[0], m.conv.weight),
    "a convolution of one row": lambda m, x: F.conv1d(x[0, :, 0] * m.scale, m.conv.weight[0]),
    "a linear of one row": lambda m, x: m.linear(x[0, 0, 0]),
    "a one-dimensional pool": lambda m, x: F.max_pool1d(x.flatten(2) * m.scale, 2),
    "a one-dimensional average": lambda m, x: F.adaptive_avg_pool1d(x.flatten(2) * m.scale, 7),
    "repeated rows": lambda m, x: (x * m.scale).repeat_interleave(2, 0),
    "an instance norm": lambda m, x: F.instance_norm(x * m.scale),
    "a linear of many rows": lambda m, x: m.linear(x),
    "a convolution": lambda m, x: m.conv(x),
}


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.conv, self.linear, self.scale = nn.Conv2d(3, 3, 3), nn.Linear(16, 16), nn.Parameter(torch.tensor(1.5))
        self.make = make

    def forward(self, x):
        return torch.sigmoid(F.relu(self.make(self, x))).sum()


@pytest.mark.parametrize("name", MAKE)
def test_a_relu_of_a_view_keeps_its_budget(name):
    torch.manual_seed(0)
    plain = Net(MAKE[name])
    plan = gistkit.plan(plain, X, budget="100%")
    twin = gistkit.compress(copy.deepcopy(plain), plan)
    for model in (plain, twin):
        model(X).backward()
    for p, q in zip(plain.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or same_bits(p.grad, q.grad)
