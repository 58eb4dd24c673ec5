"""Fewer zeros than planned: remembered over sub-batches and steps, reported, and warned of where the budget may go."""

import copy
from dataclasses import astuple, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.codecs import CODECS
from gistkit.ir.contract import Contract
from gistkit.ir.plan import Decision, Plan
from gistkit.runtime.program import density_excess as denser

ROWS, WIDTH = 4, 2048


class Gate(nn.Module):
    """A ReLU's output that backward reads by value: as dense as the input has positive numbers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.head(torch.relu(x * 1.0))


def rows(*shares):
    """Rows with these shares of positive numbers."""
    x = -torch.ones(len(shares), WIDTH)
    for row, share in zip(x, shares, strict=True):
        row[: int(share * WIDTH)] = 1
    return x.requires_grad_()


def compressed(planned, room, sub_batches=1):
    model = Gate()
    graph = gistkit.capture(model, (rows(*[0.5] * ROWS),), on_cpu=True)
    relu = next(c for c in graph.calls if c.op == "relu")
    storage = graph.values[relu.results[0]].storage
    contract = Contract(ROWS, densities={storage: planned})
    plan = Plan("by hand", graph.fingerprint, (Decision(storage, "zvc"),), (), contract=contract)
    plan = replace(plan, budget_bytes=2**30 + room, peak_bytes=2**30, sub_batches=sub_batches)
    return gistkit.compress(model, plan), storage


def step(model, x):
    gistkit.step(model, F.cross_entropy, x, torch.zeros(len(x), dtype=torch.long))


def moved_text(storage, budget, planned_bytes, real_bytes):
    return (
        rf"the step takes longer, as there are fewer zeros than the budget of {budget} bytes was planned with: "
        rf"storage {storage}: {real_bytes} bytes where {planned_bytes} are planned, density 0.500 instead of "
        rf"0.250; 1 of these storages, {real_bytes} bytes, went to the host and come back for each use; plan again "
        r"with density=gistkit.report\(model\).densities"
    )


def test_what_does_not_fit_goes_to_the_host_and_is_warned_of_once():
    model, storage = compressed(0.25, room=100)
    n = ROWS * WIDTH
    sizes = [CODECS["zvc"].predicted_bytes(n, torch.float32, share) for share in (0.25, 0.5)]
    with pytest.warns(gistkit.BudgetWarning, match=moved_text(storage, 2**30 + 100, *sizes)):
        step(model, rows(*[0.5] * ROWS))
    step(model, rows(*[0.5] * ROWS))  # a second warning would be an error
    report = gistkit.report(model)
    found, row = report.budget, next(r for r in report.stats.rows if r.storage == storage)
    assert [astuple(d) for d in found.denser] == [(storage, 0.25, 0.5, *sizes)]
    assert found.excess_bytes == n // 4 * 4 and found.moved == {storage: sizes[1]} and row.kept_bytes == 0
    assert "larger than planned: on the host" in row.reason
    assert f"{sizes[1]} bytes, planned {sizes[0]}" in " ".join(str(report).split())
    assert f"1 of them, {sizes[1]} bytes, went to the host" in " ".join(str(report).split())


def test_a_host_without_memory_leaves_it_where_it_is_and_says_by_how_much_the_budget_may_be_exceeded(monkeypatch):
    def full(_):
        raise RuntimeError("CUDA error: out of memory")

    model, storage = compressed(0.25, room=100)
    monkeypatch.setattr(denser, "arrived", full)
    text = (
        rf"the budget of {2**30 + 100} bytes may be exceeded by up to {ROWS * WIDTH - 100}, as there are fewer zeros "
        rf"than it was planned with and the host has no memory left: storage {storage}: \d+ bytes where \d+ are "
        r"planned, density 0.500 instead of 0.250; plan again with"
    )
    with pytest.warns(gistkit.BudgetWarning, match=text):
        step(model, rows(*[0.5] * ROWS))
    row = next(r for r in gistkit.report(model).stats.rows if r.storage == storage)
    assert row.kept_bytes == CODECS["zvc"].predicted_bytes(ROWS * WIDTH, torch.float32, 0.5)
    assert gistkit.report(model).budget.moved == {}


def test_what_fits_beside_the_peak_is_reported_only():
    model, _ = compressed(0.25, room=ROWS * WIDTH)
    step(model, rows(*[0.5] * ROWS))
    assert gistkit.report(model).budget.excess_bytes == ROWS * WIDTH and not gistkit.report(model).budget.moved
    assert gistkit.report(copy.deepcopy(model)).budget.denser == ()


def test_the_densest_sub_batch_of_all_steps_counts():
    model, storage = compressed(0.9, room=0, sub_batches=2)
    step(model, rows(0.75, 0.75, 0.5, 0.5))
    assert gistkit.report(model).densities[storage] == 0.75
    step(model, rows(*[0.25] * ROWS))
    assert gistkit.report(model).densities[storage] == 0.75
    step(model, rows(0.1, 0.1, 0.875, 0.875))  # a warning would be an error
    assert gistkit.report(model).densities[storage] == 0.875
