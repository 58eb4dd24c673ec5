"""Rebuilds in one pass: what the parts give one after the other, bit for bit, and where the result lies."""

import pytest
import torch
from torch import nn

import gistkit
from gistkit.kernels import ops
from gistkit.kernels.layout import FORMS
from gistkit.nn import norm
from gistkit.runtime.rebuild import arithmetic
from tests.support.graphs import Residual
from tests.support.nn_cases import same_bits


@pytest.mark.parametrize("form, given", [*((form, "both") for form in FORMS), ("fused", "weight"), ("split", "bias")])
def test_a_form_is_the_arithmetic_that_it_says(form, given):
    x, weight, bias = torch.randn(4, 6, 5, 7), torch.randn(6), torch.randn(6)
    weight, bias = weight if given in ("both", "weight") else None, bias if given in ("both", "bias") else None
    mean, invstd = torch.randn(6), torch.rand(6)
    y = norm.by_kernel(form, x, mean, invstd, weight, bias)
    if form == "fused":
        assert same_bits(y, norm._fused(x, mean, invstd, weight, bias))
    # five roundings of numbers below 2**6
    wide = [None if v is None else v.double() for v in (mean, invstd, weight, bias)]
    mean, invstd, weight, bias = (None if v is None else v.view(1, -1, 1, 1) for v in wide)
    exact = (x.double() - mean) * invstd
    exact = exact if weight is None else exact * weight
    assert torch.allclose(y.double(), exact if bias is None else exact + bias, atol=2e-5)


def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_training_step_rebuilds_in_one_pass_where_that_is_exact(wrong, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(project=True), Residual(), nn.Conv2d(8, 2, 1))
    x = torch.randn(4, 3, 34, 34)
    want = step(model, x)
    monkeypatch.setattr(arithmetic, "rebuild_candidates", lambda x: [*norm.KERNEL_CANDIDATES, norm._fused])
    calls = []

    def watched(*args):
        calls.append(args[4] is not None)
        real(*args)
        if wrong and args[7]:
            args[-1].add_(1)

    real = ops.bn_rebuild
    monkeypatch.setattr(ops, "bn_rebuild", watched)
    gistkit.compress(model)
    for _ in range(2):
        model.zero_grad()
        calls.clear()
        assert all(same_bits(a, b) for a, b in zip(step(model, x), want, strict=True))
    assert any(calls) != wrong, "residual sums are rebuilt in one pass, unless that is not exact"
