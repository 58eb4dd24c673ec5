"""The network and the batch of the tests of gistkit.step."""

import torch
from torch import nn


def net(width=6):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 5, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(5 * 4, 4),
    )  # fmt: skip


def batch(n=7):
    torch.manual_seed(0)
    return torch.randn(n, 3, 8, 8), torch.randint(4, (n,))
