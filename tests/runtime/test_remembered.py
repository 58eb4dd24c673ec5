"""What the runtime remembers from call to call is made anew when what it rests on changes."""

import torch
from torch import nn

import gistkit


def test_a_parameter_that_is_unfrozen_is_planned_for():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3)).train()
    for p in model[:3].parameters():
        p.requires_grad_(False)
    x = torch.randn(4, 3, 16, 16)
    gistkit.compress(model)
    for _ in range(3):
        model(x).sum().backward()
    plain_bytes = gistkit.report(model).stats.plain_bytes
    model.requires_grad_(True)
    for _ in range(3):
        model(x).sum().backward()
    report = gistkit.report(model)
    assert report.stats.plain_bytes > plain_bytes and report.ratio > 1.2
