"""A budget kept where data have fewer zeros than planned: live bytes of steps on the CPU, gradients bit for bit."""

import copy
import gc
import warnings
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.ir.saved_graph import SavedGraph
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import CostTable, cost_table
from gistkit.planning.simulate.simulator import simulate
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.engine import LAG
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from tests.runtime.sparse_sizes.test_exact import LateCounts

BATCH, SIZE, WIDTH = 4, 16, 16
LINKED = replace(hardware("cpu"), d2h_gbps=20.0, h2d_gbps=20.0, both_gbps=20.0)
DEVICES = {"at once": LINKED, "late": replace(LINKED, async_counts=True)}
"""``late``: sizes are known as late as on CUDA, and scratch is planned for until then."""


class Chain(nn.Module):
    """ReLUs between convolutions, whose outputs backward reads by sign and by value. ``skips`` joins each pair of them
    to the one before it, so that the earlier one is read twice."""

    def __init__(self, skips: bool, bias: float) -> None:
        super().__init__()
        self.skips = skips
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else WIDTH, WIDTH, 3, padding=1) for i in range(9))
        self.head = nn.Linear(WIDTH, 10)
        for layer in self.layers:
            nn.init.constant_(layer.bias, bias)

    def forward(self, x):
        before = None
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.skips and before is not None and i % 2:
                x = x + before
            x = F.relu(x)
            before = x if i % 2 else before
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True)
class Case:
    """A model whose ReLUs let most pass, and a step of it of which few non-zeros are expected."""

    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    graph: SavedGraph
    costs: CostTable
    loss: torch.Tensor
    grads: list

    def planned(self, room_bytes, **words):
        """Gist's plan with a budget of its peak and a little."""
        peak_bytes = plan_graph(self.graph, self.costs, policy="gist", **words).peak_bytes
        return plan_graph(self.graph, self.costs, policy="gist", budget=peak_bytes + room_bytes, **words)


@cache
def case(skips, device, bias=0.1, density=0.2):
    torch.manual_seed(0)
    model, x, y = Chain(skips, bias).train(), torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH)
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    costs = cost_table(graph, DEVICES[device], density=density)
    loss, grads, _ = run(copy.deepcopy(model), x, y)
    return Case(model, x, y, graph, costs, loss, grads)


def run(model, x, y):
    """(loss, gradients, peak of live bytes), everything counted."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveBytes() as live:
        live.track(model, x, y)
        loss = gistkit.step(model, F.cross_entropy, x, y)
    return loss, [p.grad for p in model.parameters()], live.peak_bytes


def compressed(model, plan, device):
    model = gistkit.compress(copy.deepcopy(model), plan)
    if device == "late":
        compressed_forward(model).engine._packer = ExactPacker(lag=LAG, bounded=True, transport=LateCounts)
    return model


def told(model, c):
    """(loss, gradients, peak) of a step of a compressed model, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as texts:
        warnings.simplefilter("always")
        found = run(model, c.x, c.y)
    return found, [str(w.message) for w in texts]


def check(c, plan, device):
    """The report of a step that must keep the budget and every bit."""
    model = compressed(c.model, plan, device)
    (loss, grads, peak), texts = told(model, c)
    found = gistkit.report(model).budget
    assert peak <= plan.budget_bytes
    assert torch.equal(loss, c.loss) and all(torch.equal(a, b) for a, b in zip(grads, c.grads, strict=True))
    assert len(texts) == bool(found.moved) and all("the step takes longer" in text for text in texts)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("skips", "room_bytes"), [(False, 0), (True, 60_000)])
def test_the_budget_is_kept_and_every_bit(skips, room_bytes, device):
    c = case(skips, device)
    found = check(c, c.planned(room_bytes), device)
    assert len(found.moved) >= 2 and found.excess_bytes > 2 * room_bytes


@cache
def measured(skips):
    """The densities that a step of the model really has."""
    c = case(skips, "at once")
    recorded = gistkit.capture(c.model, (c.x,), fake=False)
    return {s.id: s.density for s in recorded.storages if s.density is not None}


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    skips=st.booleans(),
    device=st.sampled_from(list(DEVICES)),
    room_bytes=st.integers(0, 60_000),
    shares=st.lists(st.floats(0.1, 1.1), min_size=16, max_size=16),
)
def test_any_densities_planned_keep_the_budget(skips, device, room_bytes, shares):
    c = case(skips, device)
    planned = {s: min(1.0, share * d) for (s, d), share in zip(measured(skips).items(), shares, strict=False)}
    c = replace(c, costs=cost_table(c.graph, DEVICES[device], density=planned))
    check(c, c.planned(room_bytes), device)


@pytest.mark.parametrize("lossy", ["fp8s", "fp10", "fp16s"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_lossy_payloads_keep_the_budget(lossy, share):
    c = case(False, "late")
    planned = {s: share * d for s, d in measured(False).items()}
    c = replace(c, costs=cost_table(c.graph, DEVICES["late"], density=planned))
    plan = c.planned(0, fidelity="lossy", lossy=lossy)
    (_, _, peak), texts = told(compressed(c.model, plan, "late"), c)
    assert any(d.codec == "zvc+" + lossy for d in plan.decisions)
    assert peak <= plan.budget_bytes and len(texts) == (share < 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_payload_that_was_planned_for_the_host_stays_there_as_values(device):
    c = case(False, device)
    plan = c.planned(0)
    first = next(d for d in plan.decisions if d.codec == "zvc")
    block = next(b for b in c.graph.blocks if b.storage == first.storage)
    start = len([t for t in c.graph.tasks if t.phase == "forward"])
    again = min(u.task for u in block.uses)
    moved = replace(first, place="host", release=start, prefetch=again)
    decisions = tuple(moved if d is first else d for d in plan.decisions)
    plan = replace(plan, decisions=decisions)
    peak_bytes = simulate(c.graph, plan, c.costs).peak_bytes
    plan = replace(plan, peak_bytes=peak_bytes, budget_bytes=peak_bytes)
    assert first.storage in check(c, plan, device).moved


def test_where_there_is_no_other_memory_it_stays_and_the_excess_is_told():
    """A plan for the CPU that a model is on, as ``gistkit.plan`` makes it: nothing is copied beside the budget."""
    model, x, y = Chain(False, 0.1).train(), torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH)
    asked = {"loss_fn": F.cross_entropy, "policy": "gist", "density": 0.2}
    budget = gistkit.plan(model, x, y, **asked).peak_bytes
    plan = gistkit.plan(model, x, y, budget=budget, **asked)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(gistkit.BudgetWarning, match="the host has no memory of its own") as warned, LiveBytes() as live:
        live.track(twin, x, y)
        gistkit.step(twin, F.cross_entropy, x, y)
    over_bytes = int(str(warned[0].message).split("up to ")[1].split(",")[0])
    assert 0 < live.peak_bytes - budget <= over_bytes
    assert gistkit.report(twin).budget.moved == {}
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
