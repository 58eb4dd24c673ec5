"""Forwards of fewer rows than planned, under a budget: an epoch's last batch, uneven sub-batches. What PyTorch's own
ops save is known by its shape, so these are captured for themselves."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime import engine
from tests.support.peaks import held_step, least_plan, peaks_of_steps

ROWS = 8
LABELS = torch.arange(ROWS) % 5


class Net(nn.Module):
    """Convolutions with SiLUs, which gistkit has no operators for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        convs = [nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(4)]
        self.body = nn.Sequential(*(m for conv in convs for m in (conv, nn.SiLU())))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


@pytest.fixture
def captures(monkeypatch):
    """The number of rows of every forward that a given plan was compiled for."""
    seen = []
    compiled = engine.given_program

    def given_program(plan, model, args, kwargs):
        seen.append(len(args[0]))
        return compiled(plan, model, args, kwargs)

    monkeypatch.setattr(engine, "given_program", given_program)
    return seen


def test_fewer_rows_take_less(captures):
    model, x = Net(), torch.randn(ROWS, 3, 16, 16)
    plan = least_plan(model, x, LABELS, loss_fn=F.cross_entropy, density=1.0)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for rows in (3, 8, 3):
        part, labels = x[:rows].clone(), LABELS[:rows].clone()
        peaks = peaks_of_steps(twin, lambda p=part, t=labels: held_step(twin, F.cross_entropy, p, t), part, labels)
        model.zero_grad()
        held_step(model, F.cross_entropy, part, labels)
        # parameters and their gradients are less than a seventh of the plan's peak; all else is in proportion
        assert max(peaks) <= plan.peak_bytes * (rows / ROWS + 1 / 7)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert captures == [3, 8]
