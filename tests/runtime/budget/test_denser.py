"""Fewer zeros than planned: remembered over sub-batches and steps, reported, and warned of where the budget may go."""

import copy
import gc
from dataclasses import astuple, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.codecs import CODECS
from gistkit.ir.contract import Contract
from gistkit.ir.plan import Decision, Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.engine import LAG
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from tests.runtime.sparse_sizes.test_exact import LateCounts
from tests.support.graphs import Apply
from tests.support.models import relu_chain
from tests.support.peaks import densities_of

ROWS, WIDTH = 4, 2048


def rows(*shares):
    """Rows with these shares of positive numbers."""
    x = -torch.ones(len(shares), WIDTH)
    for row, share in zip(x, shares, strict=True):
        row[: int(share * WIDTH)] = 1
    return x.requires_grad_()


def compressed(planned, room, sub_batches=1):
    """A ReLU's output that backward reads by value: as dense as the input has positive numbers."""
    model = Apply(lambda m, x: m[0](torch.relu(x * 1.0)), nn.Linear(WIDTH, 2))
    graph = gistkit.capture(model, (rows(*[0.5] * ROWS),), on_cpu=True)
    relu = next(c for c in graph.calls if c.op == "relu")
    storage = graph.values[relu.results[0]].storage
    contract = Contract(ROWS, densities={storage: planned})
    plan = Plan("by hand", graph.fingerprint, (Decision(storage, "zvc"),), (), contract=contract)
    plan = replace(plan, budget_bytes=2**30 + room, peak_bytes=2**30, sub_batches=sub_batches)
    return gistkit.compress(model, plan), storage


def step(model, x):
    gistkit.step(model, F.cross_entropy, x, torch.zeros(len(x), dtype=torch.long))


def test_what_has_no_room_is_warned_of_once_and_reported():
    model, storage = compressed(0.25, room=100)
    n = ROWS * WIDTH
    sizes = [CODECS["zvc"].predicted_bytes(n, torch.float32, share) for share in (0.25, 0.5)]
    text = (
        rf"the budget of {2**30 + 100} bytes may be exceeded by up to {n - 100}, as there are fewer zeros than it was "
        rf"planned with: storage {storage}: {sizes[1]} bytes where {sizes[0]} are planned, density 0.500 instead of "
        r"0.250; plan again with density=gistkit.report\(model\).densities"
    )
    with pytest.warns(gistkit.BudgetWarning, match=text):
        step(model, rows(*[0.5] * ROWS))
    step(model, rows(*[0.5] * ROWS))  # a second warning would be an error
    report = gistkit.report(model)
    found, row = report.budget, next(r for r in report.stats.rows if r.storage == storage)
    assert [astuple(d) for d in found.denser] == [(storage, 0.25, 0.5, *sizes)]
    assert found.excess_bytes == n and row.kept_bytes == sizes[1]
    assert f"{sizes[1]} bytes, planned {sizes[0]}" in " ".join(str(report).split())


def test_what_fits_beside_the_peak_is_reported_only():
    model, _ = compressed(0.25, room=ROWS * WIDTH)
    step(model, rows(*[0.5] * ROWS))
    assert gistkit.report(model).budget.excess_bytes == ROWS * WIDTH
    assert gistkit.report(copy.deepcopy(model)).budget.denser == ()


def test_the_densest_sub_batch_of_all_steps_counts():
    model, storage = compressed(0.9, room=0, sub_batches=2)
    step(model, rows(0.75, 0.75, 0.5, 0.5))
    assert gistkit.report(model).densities[storage] == 0.75
    step(model, rows(*[0.25] * ROWS))
    assert gistkit.report(model).densities[storage] == 0.75
    step(model, rows(0.1, 0.1, 0.875, 0.875))  # a warning would be an error
    assert gistkit.report(model).densities[storage] == 0.875


class Chain(nn.Module):
    """ReLUs that let most pass between convolutions, whose outputs backward reads by sign and by value."""

    def __init__(self):
        super().__init__()
        self.layers = relu_chain(7, 8, 0.1)[:14:2]

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.mean((2, 3))


def peak_of(model, x, y):
    gc.collect()
    with LiveBytes(timeline=False) as live:
        live.track(model, x, y)
        gistkit.step(model, F.cross_entropy, x, y)
    return live.peak_bytes


def test_the_budget_is_exceeded_by_no_more_than_the_warning_says_and_no_bit_changes():
    model, x, y = Chain(), torch.randn(4, 3, 16, 16), torch.arange(4)
    asked = {"loss_fn": F.cross_entropy, "policy": "gist", "density": 0.2}
    budget = gistkit.plan(model, x, y, **asked).peak_bytes
    twin = gistkit.compress(copy.deepcopy(model), gistkit.plan(model, x, y, budget=budget, **asked))
    with pytest.warns(gistkit.BudgetWarning, match="may be exceeded by up to") as warned:
        peak_bytes = peak_of(twin, x, y)
    over_bytes = int(str(warned[0].message).split("up to ")[1].split(",")[0])
    assert 0 < peak_bytes - budget <= over_bytes
    F.cross_entropy(model(x), y).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def read_early_and_late():
    """A ReLU whose output backward reads before and after its widest moment."""
    torch.manual_seed(0)
    convs = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((3, 8), (8, 8), (8, 32), (32, 8), (8, 8)))

    def forward(m, x):
        x = F.relu(m[0](x))
        wide = m[2](torch.tanh(m[1](x)))
        return (m[3](torch.tanh(wide)) + m[4](x)).mean((2, 3))

    return Apply(forward, *convs)


def budget_and_peak(network, lossy, late):
    """Bytes, where gist plans by the densities of the batch that is measured; ``late``: counts arrive when waited for.
    A warning would be an error."""
    model, x, y = network(), torch.randn(4, 3, 16, 16), torch.arange(4)
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    costs = cost_table(graph, replace(hardware("cpu"), async_counts=late), density=densities_of(model, x))
    words = {"policy": "gist", **({"fidelity": "lossy", "lossy": lossy} if lossy else {})}
    peak_bytes = plan_graph(graph, costs, **words).peak_bytes
    plan = plan_graph(graph, costs, budget=peak_bytes, **words)
    assert any(d.codec == ("zvc+" + lossy if lossy else "zvc") for d in plan.decisions)
    twin = gistkit.compress(model, plan)
    if late:
        compressed_forward(twin).engine._packer = ExactPacker(lag=LAG, bounded=True, transport=LateCounts)
    return peak_bytes, peak_of(twin, x, y)


@pytest.mark.parametrize("network", [Chain, partial(relu_chain, 7, 8, 0.1), read_early_and_late])
@pytest.mark.parametrize("lossy", [None, "fp8s", "fp10"])
def test_sizes_that_are_known_late_keep_a_budget_planned_for_them(lossy, network):
    """As on CUDA: scratch is planned for until the counts arrive, here never by themselves."""
    budget_bytes, peak_bytes = budget_and_peak(network, lossy, late=True)
    assert peak_bytes <= budget_bytes


@pytest.mark.parametrize("lossy", ["fp8s", "fp10"])
def test_what_packing_takes_beside_the_payload_is_in_the_budget(lossy):
    budget_bytes, peak_bytes = budget_and_peak(Chain, lossy, late=False)
    assert peak_bytes == budget_bytes
