"""Attacks on sub-batches: models that take another way for single rows, inputs that are no rows.

What `plan` returns, `step` carries out, within the budget.
"""

import copy

import pytest
import torch
from torch import nn

import gistkit
from tests.support.peaks import least_bytes, peaks_of_steps


class Encoder(nn.Module):
    """PyTorch's attention asks for a batch of one row, and goes without a view then."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)

    def forward(self, x, mask=None):
        return self.layer(x, mask)


def loss_fn(y, _):
    return y.square().mean()


def least_plan(model, x, targets, **words):
    """The plan for the least budget of its class."""
    least = least_bytes(model, x, targets, loss_fn=loss_fn, **words)
    return gistkit.plan(model, x, targets, budget=least, loss_fn=loss_fn, **words)


def run(model, plan, x, targets):
    """(gradients, peaks) of two steps under a plan."""
    twin = gistkit.compress(copy.deepcopy(model), plan)
    peaks = peaks_of_steps(twin, lambda: gistkit.step(twin, loss_fn, x, targets, verify=False), x, targets)
    return [p.grad for p in twin.parameters()], peaks


def test_single_rows_that_go_another_way_are_no_sub_batches():
    torch.manual_seed(0)
    batch, parts = 7, 3
    model, x, targets = Encoder(), torch.randn(batch, 5, 16), torch.zeros(batch)
    plan = least_plan(model, x, targets, fidelity="reassociated")
    assert plan.sub_batches == parts
    _, peaks = run(model, plan, x, targets)
    assert max(peaks) <= plan.peak_bytes


def test_what_is_not_cut_along_rows_stays_whole():
    """A mask of the sequence's length has no rows of the batch."""
    model, inputs, targets = Encoder(), (torch.randn(6, 5, 16), torch.zeros(5, 5)), torch.zeros(6)
    plan = least_plan(model, inputs, targets, fidelity="reassociated")
    assert plan.sub_batches == 1
    run(model, plan, inputs, targets)


def normed():
    """A batch norm between convolutions; each row goes as the batch does but for the statistics."""
    norms = (nn.Conv2d(3, 18, 3), nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 9, 3), nn.BatchNorm2d(9), nn.ReLU())
    return nn.Sequential(*norms, nn.Flatten(), nn.Linear(9 * 12 * 12, 4))


def test_batch_norms_see_parts_only_where_plan_and_step_are_told():
    torch.manual_seed(0)
    model, x, targets = normed(), torch.randn(8, 3, 16, 16), torch.zeros(8)
    words = {"fidelity": "reassociated", "loss_fn": loss_fn}
    budget = least_bytes(model, x, targets, **words)
    assert gistkit.plan(model, x, targets, budget=budget, **words).sub_batches == 1
    accepted = {**words, "per_sub_batch_norm": True}
    plan = gistkit.plan(model, x, targets, budget=int(budget * 0.8), **accepted)
    assert plan.sub_batches > 1 and plan.lower_bound_bytes < budget
    twin = gistkit.compress(copy.deepcopy(model), plan)
    with pytest.raises(ValueError, match="a batch norm must see the whole batch"):
        gistkit.step(twin, loss_fn, x, targets)

    def step(of=twin, parts=None):
        return gistkit.step(of, loss_fn, x, targets, sub_batches=parts, per_sub_batch_norm=True, verify=False)

    assert max(peaks_of_steps(twin, step, x, targets)) <= plan.peak_bytes
    for _ in range(2):  # the running statistics have seen two steps
        model.zero_grad(set_to_none=True)
        step(model, plan.sub_batches)
    # Sums in another order, of at most 8 * 14 * 14 terms: 1568 roundings of 2**-24 are below 1e-4 of what is added.
    for mine, plain in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(twin.buffers(), model.buffers(), strict=True))
