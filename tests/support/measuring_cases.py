"""A network whose step draws from every source of random numbers, for the tests of measured times."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gistkit.planning.cost.devices import PRESETS

NET = "tests.support.measuring_cases:network"
SMALL = [NET, "--batch", "4", "--image-size", "16"]
CPU = PRESETS["cpu"]


class Net(nn.Module):
    """Batch norm, dropout, and numbers drawn from Python and NumPy: everything that a step changes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x):
        random.random()
        np.random.rand()
        return self.head(self.drop(F.relu(self.norm(self.conv(x))).mean((2, 3))))


def network(image_size=16):
    return Net()


def step(batch=4):
    torch.manual_seed(0)
    return Net(), torch.randn(batch, 3, 16, 16)


def targets(batch=4):
    return torch.arange(batch) % 5


def saved(tmp_path, found):
    file = tmp_path / "times.json"
    file.write_text(found.to_json())
    return file
