"""Forwards of few rows that go another way through a model than the planned ones: refused, whatever came before them,
under every budget. Nothing of what they keep was planned."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import PlanMismatchError
from tests.support.peaks import held_step, least_bytes

ROWS = 8
LABELS = torch.arange(ROWS) % 5


class Alone(nn.Module):
    """Convolutions with SiLUs; a single row goes through ``way`` behind the first ``after`` of them."""

    def __init__(self, way, after):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(6))
        self.head, self.way, self.after = nn.Linear(8, 5), way, after

    def forward(self, x):
        for i, conv in enumerate(self.convs):
            x = self.way(x) if len(x) == 1 and i == self.after else x
            x = F.silu(conv(x))
        x = self.way(x) if len(x) == 1 and self.after == len(self.convs) else x
        return self.head(x.mean((2, 3)))


def many(x, maps=60):
    """Keeps so many maps."""
    return torch.stack([(x * i).sin() for i in range(maps)]).sum(0)


@cache
def planned(budget):
    """For a batch of all rows, which goes the same way through all of these models."""
    model, x = Alone(torch.sin, 0), torch.randn(ROWS, 3, 16, 16)
    asked = {"loss_fn": F.cross_entropy, "density": 1.0}
    if budget == "least":
        budget = least_bytes(model, x, LABELS, **asked)
    return gistkit.plan(model, x, LABELS, budget=budget, **asked)


@pytest.mark.parametrize(
    ("way", "after", "budget"),
    [(torch.sin, 0, "least"), (torch.sin, 6, "100%"), (F.relu, 0, "100%"), (F.relu, 6, "least"), (many, 6, "100%")],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_single_row_that_goes_another_way_is_refused_in_every_order(way, after, budget):
    model, x = Alone(way, after), torch.randn(ROWS, 3, 16, 16)
    plan = planned(budget)
    for order in ((1, 8, 1, 3), (8, 1, 3, 1), (3, 1, 8, 1)):
        twin = gistkit.compress(copy.deepcopy(model), plan)
        for rows in order:
            if rows == 1:
                with pytest.raises(
                    PlanMismatchError,
                    match=r"expected (call|a forward with) .*make the plan from this model",
                ):
                    held_step(twin, F.cross_entropy, x[:1], LABELS[:1])
                continue
            for m in (model, twin):
                m.zero_grad()
                held_step(m, F.cross_entropy, x[:rows], LABELS[:rows])
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
