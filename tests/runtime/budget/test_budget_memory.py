"""A budget in bytes, kept from the first step on: real steps on the CPU, every live byte counted, against budget and
prediction.

Densities are those of a recorded step, so that the prediction knows how many zeros there are; a step of the model that
was captured has the very same. What remains between prediction and measurement is the scratch in which the first step
verifies what comes back (bitwise plans: to the byte without it), or the zeros that rounding moves (lossy ones).
"""

import copy
from collections import namedtuple
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import BudgetError
from gistkit.ir.contract import Contract
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.policies.registry import plain
from tests.support.models import DenseNet, UNet, bottlenecks, convolutions, inceptions
from tests.support.peaks import densities_of, held_step, peaks_of_steps, steady_peak_bytes

BATCH = 4
LIMITS = {"time_limit_s": 0.6}
TIGHT = 0.05
NETS = {"convolutions": convolutions, "bottlenecks": bottlenecks, "inceptions": inceptions}
NETS |= {"dense": DenseNet, "unet": UNet}

Case = namedtuple("Case", "model x y graph costs loss grads plain_bytes")
"""A model with its batch, its captured step and costs, and what a plain step gives and needs."""


def run(model, x, y, parts=1):
    """(loss, gradients) of the second of two steps from no gradients, the peaks of live bytes of both."""
    losses = []

    def step():
        torch.manual_seed(3)
        take = partial(gistkit.step, sub_batches=parts) if parts > 1 else held_step
        losses.append(take(model, F.cross_entropy, x, y))

    peaks = peaks_of_steps(model, step, x, y)
    return losses[1], [p.grad for p in model.parameters()], peaks


@cache
def case(name):
    torch.manual_seed(0)
    model, x = NETS[name]().train(), torch.randn(BATCH, 3, 32, 32)
    y = torch.arange(BATCH) if model(x).dim() == 2 else torch.randint(4, (BATCH, 32, 32))
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    costs = cost_table(graph, hardware("cpu"), density=densities_of(model, x))
    loss, grads, peaks = run(copy.deepcopy(model), x, y)
    return Case(model, x, y, graph, costs, loss, grads, peaks[-1])


@cache
def of_rows(name):
    """The case with the densities of the densest row: none of its sub-batches is denser."""
    c = case(name)
    if any(isinstance(m, nn.BatchNorm2d) for m in c.model.modules()):
        return c  # is not cut
    found = [densities_of(c.model, c.x[i : i + 1]) for i in range(BATCH)]
    densest = {s: max(d.get(s, 0.0) for d in found) for s in c.costs.densities}
    return c._replace(costs=cost_table(c.graph, hardware("cpu"), density=densest))


@cache
def least_of(name, fidelity, lossy=None):
    """The least peak of a class of moves."""
    c = of_rows(name) if fidelity == "reassociated" else case(name)
    with pytest.raises(BudgetError) as refused:
        optimal(c.graph, c.costs, 1, fidelity=fidelity, lossy=lossy, **LIMITS)
    return refused.value.least_bytes[fidelity]


def planned(name, share, fidelity="bitwise", lossy=None):
    """A plan for a budget at a share of the way from the least peak to that of plain PyTorch."""
    c = of_rows(name) if fidelity == "reassociated" else case(name)
    low = least_of(name, fidelity, lossy)
    budget = int(low + share * (c.plain_bytes - low))
    made = optimal(c.graph, c.costs, budget, fidelity=fidelity, lossy=lossy, **LIMITS)
    return replace(made, contract=Contract(BATCH))


@pytest.mark.parametrize("name", NETS)
def test_plain_is_predicted_to_the_byte(name):
    assert plain(case(name).graph, case(name).costs).peak_bytes == case(name).plain_bytes


@pytest.mark.parametrize(("name", "share"), [*((name, TIGHT) for name in NETS), ("dense", 0.7)])
def test_bitwise_plans_keep_the_budget_and_every_bit(name, share):
    c, plan = case(name), planned(name, share)
    loss, grads, peaks = run(gistkit.compress(copy.deepcopy(c.model), plan), c.x, c.y)
    assert max(peaks) <= plan.peak_bytes <= plan.budget_bytes < c.plain_bytes and plan.fidelity == "bitwise"
    assert min(peaks) >= 0.95 * plan.peak_bytes
    assert peaks[1] == steady_peak_bytes(c.graph, plan, c.costs)
    assert torch.equal(loss, c.loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, c.grads, strict=True))


def test_those_plans_have_all_kinds_of_what_comes_back():
    found = {d.codec for name in NETS for d in planned(name, TIGHT).decisions}
    assert {"rebuild", "recompute", "zvc"} <= found


def test_reassociated_plans_keep_the_budget():
    c, plan = of_rows("inceptions"), planned("inceptions", 0.0, "reassociated")
    loss, grads, peaks = run(gistkit.compress(copy.deepcopy(c.model), plan), c.x, c.y, plan.sub_batches)
    assert 0.95 * plan.peak_bytes <= min(peaks) <= max(peaks) <= plan.peak_bytes <= plan.budget_bytes
    expected_loss, expected, _ = run(copy.deepcopy(c.model), c.x, c.y, plan.sub_batches)
    assert plan.sub_batches > 1 and torch.equal(loss, expected_loss)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_lossy_plans_keep_the_budget():
    c, plan = case("convolutions"), planned("convolutions", 0.1, "lossy", "fp8")
    _, _, peaks = run(gistkit.compress(copy.deepcopy(c.model), plan), c.x, c.y, plan.sub_batches)
    assert max(peaks) <= plan.budget_bytes
    assert steady_peak_bytes(c.graph, plan, c.costs) == pytest.approx(peaks[1], rel=0.001)
