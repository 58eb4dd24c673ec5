"""Branches that lead nowhere save what no backward reads: a budget counts it as it is, and no decision is for it."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.live import LiveBytes
from tests.support.nn_cases import same_bits
from tests.support.peaks import held_step, least_bytes


class Dead(nn.Module):
    """Convolutions and ReLUs, a pool, and beside them what leads nowhere, alive until the forward ends."""

    def __init__(self, branch):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.dead, self.head, self.branch = nn.Conv2d(16, 4, 1), nn.Linear(16, 5), branch

    def forward(self, x):
        y = F.relu(self.a(x))
        z = F.avg_pool2d(y, 2)
        held = {
            "both": lambda: (torch.sigmoid(y) * y, self.dead(y)),
            "nothing": lambda: None,
        }[self.branch]()
        z = F.relu(self.b(z))
        out = self.head(z.mean((2, 3)))
        del held
        return out


def first_of(out, y):
    return F.cross_entropy(out[0] if isinstance(out, tuple) else out, y)


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.arange(4)


def step(model, x, y):
    model.zero_grad()
    with LiveBytes(timeline=False) as live:
        live.track(model, x, y)
        loss = held_step(model, first_of, x, y)
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)], live.peak_bytes


def test_what_a_dead_branch_saves_is_kept_as_it_is():
    torch.manual_seed(0)
    model, (x, y) = Dead("both"), batch()
    plain, plain_peak = step(copy.deepcopy(model), x, y)
    least = least_bytes(model, x, y, loss_fn=F.cross_entropy)
    assert least <= plain_peak
    for budget in (least, (least + plain_peak) // 2):
        twin = gistkit.compress(copy.deepcopy(model), gistkit.plan(model, x, y, loss_fn=F.cross_entropy, budget=budget))
        for _ in range(2):
            ours, peak = step(twin, x, y)
            assert peak <= budget
            assert all(same_bits(a, b) for a, b in zip(ours, plain, strict=True))
