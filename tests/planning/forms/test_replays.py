"""Segments that the runtime would refuse to run anew are not planned."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.recompute_cases import Chain, Hidden, block
from tests.support.training import assert_same, batches


class Overwrites(nn.Module):
    """Adds to an activation that something else was made of, of which backward needs nothing."""

    def forward(self, x):
        y = x * 1.5
        z = torch.tanh(torch.cumsum(y, 1))
        return z + y.add_(1)


class Counts(nn.Module):
    """A norm that updates running statistics by a call that is not batch_norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.instance_norm(x, self.mean, self.var, use_input_stats=True)


@pytest.mark.parametrize(
    ("part", "policy"),
    [(Hidden, "checkpoint"), (Overwrites, "checkpoint"), (Counts, "checkpoint"), (Counts, "optimal")],
)
def test_plans_run_whatever_stands_in_between(part, policy):
    torch.manual_seed(0)
    parts = (*(block(8 if i else 3, 8) for i in range(3)), part(), *(block(8, 8) for _ in range(3)))
    model, data = Chain(*parts), batches(2, 4, 8)
    words = {"loss_fn": F.cross_entropy, "density": 1.0, "policy": policy}
    plan = gistkit.plan(model, *data[0], budget="80%" if policy == "optimal" else None, **words)
    assert policy == "optimal" or any(d.codec == "recompute" for d in plan.decisions)
    assert_same(model, gistkit.compress(copy.deepcopy(model), plan), data)
