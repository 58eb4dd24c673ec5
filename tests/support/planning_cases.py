"""A small network, its batch and a plan of it, for the tests of gistkit.plan."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning.cost.devices import PRESETS

GIB = 2**30
H200 = replace(PRESETS["h200"], libraries_bytes=0)
"""What the libraries hold is far more than these networks."""


def net(batch_norm=False):
    """Convolutions and pools on 32x32 images, 10 classes."""
    torch.manual_seed(0)
    layers = []
    for inside, out in ((3, 16), (16, 32), (32, 32)):
        norm = [nn.BatchNorm2d(out)] if batch_norm else []
        layers += [nn.Conv2d(inside, out, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


X, T = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def made(model=None, **words):
    return gistkit.plan(model or net(), X, T, loss_fn=F.cross_entropy, **{"hardware": H200, **words})
