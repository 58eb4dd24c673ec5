"""Fewer zeros than planned: remembered over sub-batches and steps, reported, and warned of where the budget may go."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.plan.plan import Decision, Plan

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
    settings = {"batch": ROWS, "densities": {str(storage): planned}}
    plan = Plan("by hand", graph.fingerprint, (Decision(storage, "zvc"),), (), settings=settings)
    plan = replace(plan, budget_bytes=2**30 + room, peak_bytes=2**30, sub_batches=sub_batches)
    return gistkit.compress(model, plan), storage


def step(model, x):
    gistkit.step(model, F.cross_entropy, x, torch.zeros(len(x), dtype=torch.long))


def test_what_does_not_fit_is_warned_of_once_with_its_bytes():
    model, storage = compressed(0.25, room=100)
    n = ROWS * WIDTH
    # a quarter more of the elements, of 4 bytes each, than planned
    text = (
        rf"the budget of {2**30 + 100} bytes may be exceeded by up to {n // 4 * 4 - 100}, as there are fewer zeros "
        rf"than it was planned with: storage {storage}: \d+ bytes where \d+ are planned, density 0.500 instead of "
        r"0.250; plan again with density=gistkit.report\(model\).densities"
    )
    with pytest.warns(gistkit.BudgetWarning, match=text):
        step(model, rows(*[0.5] * ROWS))
    step(model, rows(*[0.5] * ROWS))  # a second warning would be an error
    found = gistkit.report(model).budget
    planned, real = found.payload_bytes[storage]
    assert real - planned == found.excess_bytes == n // 4 * 4 and found.denser == {storage: (0.25, 0.5)}
    assert real == next(r.kept_bytes for r in gistkit.report(model).stats.rows if r.storage == storage)
    assert f"{real} bytes, planned {planned}" in " ".join(str(gistkit.report(model)).split())


def test_what_fits_beside_the_peak_is_reported_only():
    model, _ = compressed(0.25, room=ROWS * WIDTH)
    step(model, rows(*[0.5] * ROWS))
    assert gistkit.report(model).budget.excess_bytes == ROWS * WIDTH
    assert gistkit.report(copy.deepcopy(model)).budget.denser == {}


def test_the_densest_sub_batch_of_all_steps_counts():
    model, storage = compressed(0.9, room=0, sub_batches=2)
    step(model, rows(0.75, 0.75, 0.5, 0.5))
    assert gistkit.report(model).densities[storage] == 0.75
    step(model, rows(*[0.25] * ROWS))
    assert gistkit.report(model).densities[storage] == 0.75
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, rows(0.1, 0.1, 0.875, 0.875))
    assert gistkit.report(model).densities[storage] == 0.875
