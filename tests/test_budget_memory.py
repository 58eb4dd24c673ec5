"""A budget in bytes, kept: real steps on the CPU, every live byte counted, against the budget and the prediction.

Densities are those of a recorded step, so that the prediction knows how many zeros there are; a step of the model that
was captured has the very same. What remains between prediction and measurement is nothing (bitwise plans: to the byte)
or the zeros that rounding moves (lossy ones).
"""

import copy
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit import zoo
from gistkit.errors import BudgetError
from gistkit.plan.cost import cost_table
from gistkit.plan.hardware import hardware
from gistkit.plan.policies.optimal import optimal
from gistkit.plan.policies.plain import plain
from gistkit.runtime.live import LiveBytes
from tests.models import DenseNet, UNet

BATCH = 4
# Segments that run anew have tests of their own (test_recompute.py).
LIMITS = {"time_limit_s": 0.6, "recompute": False}
SHARES = (0.05, 0.3, 0.5, 0.7, 0.95)
NETS = {
    "vgg16": (lambda: zoo.load("vgg16", num_classes=10, image_size=32), 32),
    "resnet50": (lambda: zoo.load("resnet50", num_classes=10, image_size=32), 32),
    "googlenet": (lambda: zoo.load("googlenet", num_classes=10, image_size=32), 32),
    "dense": (DenseNet, 32),
    "unet": (UNet, 32),
}


@dataclass(frozen=True)
class Case:
    """A model with its batch, its captured step and costs, and what a plain step gives and needs."""

    model: torch.nn.Module
    x: torch.Tensor
    y: torch.Tensor
    graph: gistkit.SavedGraph
    costs: object
    loss: torch.Tensor
    grads: list
    plain_bytes: int


def run(model, x, y):
    """(loss, gradients, peak of live bytes) of the second of two steps, everything counted, gradients none at first."""
    for _ in range(2):
        torch.manual_seed(3)
        model.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            live.track(model, x, y)
            loss = gistkit.step(model, F.cross_entropy, x, y)
    return loss, [p.grad for p in model.parameters()], live.peak_bytes


@cache
def case(name):
    make, size = NETS[name]
    torch.manual_seed(0)
    model, x = make().train(), torch.randn(BATCH, 3, size, size)
    y = torch.arange(BATCH) if model(x).dim() == 2 else torch.randint(4, (BATCH, size, size))
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    recorded = gistkit.capture(model, (x,), fake=False)
    density = {s.id: s.density for s in recorded.storages if s.density is not None}
    costs = cost_table(graph, hardware("cpu"), density=density)
    loss, grads, peak = run(copy.deepcopy(model), x, y)
    return Case(model, x, y, graph, costs, loss, grads, peak)


@cache
def least(name, fidelity, lossy=None):
    """The least peak of a class of moves."""
    with pytest.raises(BudgetError) as refused:
        optimal(case(name).graph, case(name).costs, 1, fidelity=fidelity, lossy=lossy, **LIMITS)
    return refused.value.least_bytes[fidelity]


def planned(name, share, fidelity="bitwise", lossy=None):
    """A plan for a budget at a share of the way from the least peak to that of plain PyTorch."""
    c = case(name)
    low = least(name, fidelity, lossy)
    budget = int(low + share * (c.plain_bytes - low))
    made = optimal(c.graph, c.costs, budget, fidelity=fidelity, lossy=lossy, **LIMITS)
    return replace(made, settings={**made.settings, "batch": BATCH})


@pytest.mark.parametrize("name", NETS)
def test_plain_is_predicted_to_the_byte(name):
    assert plain(case(name).graph, case(name).costs).peak_bytes == case(name).plain_bytes


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("share", SHARES)
def test_bitwise_plans_keep_the_budget_and_every_bit(name, share):
    c, plan = case(name), planned(name, share)
    loss, grads, peak = run(gistkit.compress(copy.deepcopy(c.model), plan), c.x, c.y)
    assert peak <= plan.budget_bytes < c.plain_bytes and plan.fidelity == "bitwise"
    assert peak == plan.peak_bytes
    assert torch.equal(loss, c.loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, c.grads, strict=True))


@pytest.mark.parametrize(
    ("name", "share"),
    [("vgg16", 0.05), ("resnet50", 0.3), ("googlenet", 0.05), ("googlenet", 0.5), ("dense", 0.05), ("unet", 0.05)],
)
def test_reassociated_plans_keep_the_budget(name, share):
    c, plan = case(name), planned(name, share, "reassociated")
    loss, _, peak = run(gistkit.compress(copy.deepcopy(c.model), plan), c.x, c.y)
    assert peak <= plan.budget_bytes and plan.peak_bytes == pytest.approx(peak, rel=0.001)
    if plan.sub_batches == 1:
        assert torch.equal(loss, c.loss)  # slices only change the order in which weight gradients are summed


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("share", [0.1])
def test_lossy_plans_keep_the_budget(name, share):
    c, plan = case(name), planned(name, share, "lossy", "fp8")
    _, _, peak = run(gistkit.compress(copy.deepcopy(c.model), plan), c.x, c.y)
    assert peak <= plan.budget_bytes and plan.peak_bytes == pytest.approx(peak, rel=0.001)


def test_classes_reach_further_down():
    for name in ("unet", "dense"):
        assert (
            least(name, "lossy", "fp8") < least(name, "reassociated") <= least(name, "bitwise") < case(name).plain_bytes
        )
