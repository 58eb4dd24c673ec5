"""Attacks on segments: the copy that an activation in place saves of what it overwrites comes back in none."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from gistkit.errors import PlanError
from gistkit.ir.plan import Decision
from gistkit.planning.forms.recompute import Replays


def loss(y, _):
    return y.square().mean()


@pytest.mark.parametrize("kind", [nn.ReLU6, nn.Hardswish, nn.SiLU])
def test_the_least_lossy_budget_is_planned_without_it(kind):
    torch.manual_seed(0)
    layers = (nn.Conv2d(8, 8, 3), kind(), nn.Conv2d(8, 8, 3), kind(inplace=True), nn.Conv2d(8, 8, 3))
    model, x, y = nn.Sequential(*layers), torch.randn(6, 8, 24, 24), torch.zeros(6)
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, y, budget=1, loss_fn=loss, lossy="fp8")
    plan = gistkit.plan(model, x, y, budget=refused.value.least_bytes["lossy"], loss_fn=loss, lossy="fp8")
    gistkit.step(gistkit.compress(copy.deepcopy(model), plan), loss, x, y, verify=False)  # for which it has no room

    graph = gistkit.capture(model, (x,), backward=True, loss_fn=loss, targets=(y,))
    (call,) = (c for c in graph.calls if c.inplace)
    (saved,) = (s.storage for s in call.saves)
    asked = [Decision(saved, "recompute", "nowhere", sources=(call.reads[0],))]
    with pytest.raises(PlanError, match=r"it is the copy that \w+ of 3, in place, saves of what it overwrites"):
        Replays(graph).segment(0, {saved}, asked[0].sources)
    assert Replays(graph).able(asked) == []
