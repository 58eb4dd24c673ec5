"""Plans that sum in another order, by sub-batches: what of it can differ, and by how much."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from gistkit.errors import PlanMismatchError
from gistkit.ir.contract import Contract
from gistkit.ir.plan import Decision
from tests.support.plan_cases import Shared, captured, data, loss_of, made
from tests.support.sums import Operands, assert_reordered_only


def measured(model, run):
    """(loss, gradients by name, operands) of a step from no gradients."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with Operands(model) as operands:
        loss = run(model)
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, operands


class Deep(nn.Module):
    """Four convolutions and a pool: no row of the batch depends on another, nor do a row's bits (those of a matrix
    product or of a single row may: how many rows there are tells which kernel runs)."""

    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.convs(x)


@pytest.mark.parametrize(("rows", "parts"), [(4, 1), (4, 2), (8, 4)])
def test_whole_plans_only_reorder_sums(rows, parts):
    # parts of 2 rows: means weighted by powers of two, and the kernels for several rows, so that rows keep their bits
    model, (x, y) = Deep().train(), data()
    x, y = torch.cat((x, 2 * x))[:rows], torch.cat((y, y))[:rows]
    graph, _ = captured(model, x, y)
    relus = [c for c in graph.calls if c.op == "relu"]
    decisions = [Decision(graph.values[c.results[0]].storage, "zvc") for c in relus[1:]]
    fields = {"sub_batches": parts, "fidelity": "reassociated", "contract": Contract(rows)}
    plan = made(graph, decisions, **fields)
    plain = measured(copy.deepcopy(model), lambda m: gistkit.step(m, loss_of, x, y, verify=False))
    found = measured(
        gistkit.compress(copy.deepcopy(model), plan), lambda m: gistkit.step(m, loss_of, x, y, verify=False)
    )
    assert_reordered_only(model, plain[2], found[2], plain[1], found[1])
    if parts == 1:
        assert all(torch.equal(plain[1][n], g) for n, g in found[1].items())


def test_sub_batches_are_taken_by_step():
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    plan = made(graph, [], sub_batches=2, budget_bytes=None)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    text = r"at most 2 rows \(a batch of 4 in 2 sub-batches\), got one of 4 rows; call gistkit.step\(model, loss_fn,"
    with pytest.raises(PlanMismatchError, match=text):
        twin(x)
    found = measured(twin, lambda m: gistkit.step(m, loss_of, x, y, verify=False))
    whole = measured(model, lambda m: gistkit.step(m, loss_of, x, y, verify=False))
    assert [len(t) for t in found[2].inputs["first"]] == [2, 2]
    assert_reordered_only(model, whole[2], found[2], whole[1], found[1])
