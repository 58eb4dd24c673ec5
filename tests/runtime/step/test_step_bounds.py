"""Slices and sub-batches of whole networks: loss and every gradient within a bound that their numbers of terms give.

The kernels differ from the plain step's here: parts of one row take others than parts of several, products of matrices
others for each number of rows, so that every activation and gradient may have other bits
(tests/runtime/program/test_plan_sums.py is about those that have not).
"""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import gistkit
from gistkit.ir.contract import Contract
from gistkit.ir.plan import CallChoice
from gistkit.nn import conv, linear
from gistkit.nn.slices import row_slices
from tests.support.error_bounds import step_bounds
from tests.support.near import exact, linear_map
from tests.support.plan_cases import made
from tests.support.step_cases import Concatenated, Residual, Tokens, batch, net, per_token

ROWS = 7
SEED = 6  # with it the bounds decide every ReLU and maximum, and are tight


def tokens(rows):
    return torch.randn(rows, 6, 8), torch.randint(4, (rows, 6))


CASES = {
    "head": (net, batch, F.cross_entropy),
    "residual": (Residual, batch, F.cross_entropy),
    "norms": (lambda: Residual(norms=True), batch, F.cross_entropy),
    "concatenated": (Concatenated, batch, F.cross_entropy),
    "tokens": (Tokens, tokens, per_token),
}


@cache
def case(name):
    """(model, loss function, x, targets, bounds)."""
    make, data, loss_fn = CASES[name]
    torch.manual_seed(SEED)
    model = make()
    x, t = data(ROWS)
    return model, loss_fn, x, t, step_bounds(model, loss_fn, x, t)


def stepped(model, *args, **kwargs):
    """(loss, gradients by name) of a step from no gradients."""
    model.zero_grad(set_to_none=True)
    loss = gistkit.step(model, *args, **kwargs)
    return loss, {n: p.grad for n, p in model.named_parameters()}


def cut(name, parts, slices):
    """The model of a case under a plan by hand."""
    model, _, x, *_ = case(name)
    graph = gistkit.capture(model, (x,))
    choices = [
        CallChoice(c.covered, c.op, weight_grad_slices=slices) for c in graph.calls if c.op in ("conv2d", "linear")
    ]
    fields = {"sub_batches": parts, "fidelity": "reassociated", "contract": Contract(ROWS)}
    return gistkit.compress(copy.deepcopy(model), made(graph, [], *choices, **fields))


def test_the_bound_of_a_sum_is_reached():
    terms = torch.tensor([1.0] + [2.0**-24] * 99)
    bound = linear_map(lambda t: t.sum(), [exact(terms)])
    found = torch.ones(())
    for t in terms[1:]:
        found = found + t  # a tie, to even: nothing changes
    off = float(bound.value - found)
    assert off <= float(bound.error) <= 1.0001 * off


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_tight_enough_to_tell(name):
    model, *args, bounds = case(name)
    assert bounds.looseness < 1e-3
    assert bounds.assert_holds(*stepped(copy.deepcopy(model), *args)) > 1e-4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parts", [2, 3, 4, 7])  # parts of 3 and 4 rows, 2 and 3, 1 and 2, 1
def test_sub_batches(name, parts):
    model, *args, bounds = case(name)
    bounds.assert_holds(*stepped(copy.deepcopy(model), *args, sub_batches=parts))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("parts", "slices"), [(1, 7), (1, 3), (2, 2), (3, 3), (7, 4)])
def test_slices_of_every_gradient(name, parts, slices):
    _, *args, bounds = case(name)
    bounds.assert_holds(*stepped(cut(name, parts, slices), *args))


@pytest.mark.parametrize("name", CASES)
def test_compressed_without_a_plan(name):
    model, *args, bounds = case(name)
    twin = gistkit.compress(copy.deepcopy(model), fidelity="reassociated")
    bounds.assert_holds(*stepped(twin, *args))
    bounds.assert_holds(*stepped(twin, *args, sub_batches=3))


@pytest.mark.parametrize("name", CASES)
def test_plans_for_a_budget(name):
    model, loss_fn, x, t, bounds = case(name)
    words = {"loss_fn": loss_fn, "fidelity": "reassociated"}
    with pytest.raises(gistkit.BudgetError) as raised:
        gistkit.plan(model, x, t, budget=1, **words)
    least = raised.value.least_bytes
    plan = gistkit.plan(model, x, t, budget=(least["reassociated"] + least["bitwise"]) // 2, **words)
    assert plan.sub_batches > 1 or any(c.weight_grad_slices > 1 for c in plan.choices)
    bounds.assert_holds(*stepped(gistkit.compress(copy.deepcopy(model), plan), loss_fn, x, t))


@pytest.mark.parametrize("name", CASES)
def test_other_weights_of_the_parts_would_be_seen(name):
    # 2 and 2 and 3 rows of 7, each weighted with a third
    model, loss_fn, x, t, bounds = case(name)
    model = copy.deepcopy(model)
    parts = [slice(0, 2), slice(2, 4), slice(4, 7)]
    losses = [gistkit.step(model, lambda out, y: loss_fn(out, y) / 3, x[rows], t[rows]) for rows in parts]
    found = {n: p.grad for n, p in model.named_parameters()}
    with pytest.raises(AssertionError, match="loss is off by"):
        bounds.assert_holds(sum(losses), found)
    for n in found:
        with pytest.raises(AssertionError, match="is off by"):
            bounds.assert_holds(bounds.loss.value, {**values(bounds), n: found[n]})


def values(bounds):
    return {n: near.value for n, near in bounds.gradients.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_lost_slice_would_be_seen(name, monkeypatch):
    for module in (conv, linear):
        monkeypatch.setattr(module, "row_slices", lambda *a: list(row_slices(*a))[:-1])
    _, *args, bounds = case(name)
    loss, found = stepped(cut(name, 1, 7), *args)
    for n in (n for n in found if n.endswith("weight") and "norm" not in n):
        with pytest.raises(AssertionError, match=f"{n} is off by"):
            bounds.assert_holds(loss, {**values(bounds), n: found[n]})
