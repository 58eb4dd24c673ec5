"""Rebuilds in one pass: what the parts give one after the other, bit for bit, and where the result lies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.kernels import ops
from gistkit.kernels.launch.checks import FORMS
from gistkit.nn import norm
from gistkit.nn.keep import Alias
from gistkit.runtime.rebuild import probed as telling
from gistkit.runtime.rebuild.rebuild import AddTerm, BatchNormTerm, FusedTerm, KeptTerm, ReluTerm
from gistkit.runtime.stash.stash import RebuiltBody
from tests.support.nn_cases import DTYPES, same_bits

SHAPES = [(4, 6, 5, 7), (3, 16, 8, 8), (9, 6), (3, 6, 8)]


def batch_norm(shape, dtype, seed, channels_last, form="scaled"):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g).to(dtype)
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    mean, invstd, weight, bias = (torch.randn(shape[1], generator=g) for _ in range(4))
    return BatchNormTerm(Alias(x), norm.Factors.of(form, mean, invstd.abs(), weight, bias))


def recipes(shape, dtype, channels_last):
    bn, down = (batch_norm(shape, dtype, seed, channels_last) for seed in (1, 2))
    values = batch_norm(shape, dtype, 3, channels_last).kept.dense()
    yield "bn", ReluTerm(bn)
    yield "bn + kept", ReluTerm(AddTerm(bn, KeptTerm(Alias(values), False)))
    yield "kept + bn", ReluTerm(AddTerm(KeptTerm(Alias(values), False), bn))
    yield "bn + bn", ReluTerm(AddTerm(bn, down))
    yield "bn + rebuilt", ReluTerm(AddTerm(bn, ReluTerm(down)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_one_pass_gives_the_bits_of_its_parts(shape, dtype, channels_last):
    for name, term in recipes(shape, dtype, channels_last):
        fused = FusedTerm.of(term)
        assert fused is not None, name
        want = term.dense()
        assert same_bits(fused.dense(), want) and fused.dense().stride() == want.stride(), name
        assert same_bits(fused.dense((1, 3)), term.dense((1, 3))), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", ["both", "weight", "bias", "none"])
def test_a_form_is_the_arithmetic_that_it_says(form, given):
    x, weight, bias = torch.randn(4, 6, 5, 7), torch.randn(6), torch.randn(6)
    weight, bias = weight if given in ("both", "weight") else None, bias if given in ("both", "bias") else None
    mean, invstd = torch.randn(6), torch.rand(6)
    plain = {"fused": norm._fused, "centred": norm._centred, "normalised": norm._normalised}.get(form)
    y = norm.Factors.of(form, mean, invstd, weight, bias)(x)
    if plain is not None:
        assert same_bits(y, plain(x, mean, invstd, weight, bias))
    # five roundings of numbers below 2**6
    wide = [None if v is None else v.double() for v in (mean, invstd, weight, bias)]
    assert torch.allclose(y.double(), _exact(x, *wide), atol=2e-5)


def _exact(x, mean, invstd, weight, bias):
    over = lambda v: v.view(1, -1, 1, 1)  # noqa: E731
    y = (x.double() - over(mean)) * over(invstd)
    y = y if weight is None else y * over(weight)
    return y if bias is None else y + over(bias)


def test_a_free_operand_takes_the_result():
    bn = batch_norm((4, 6, 5, 7), torch.float32, 1, False)
    for fresh in (False, True):
        values = torch.randn(4, 6, 5, 7)
        before = values.clone()
        term = FusedTerm.of(ReluTerm(AddTerm(bn, KeptTerm(Alias(values), fresh))))
        assert term is not None
        y = term.dense()
        assert (y.data_ptr() == values.data_ptr()) == fresh
        assert fresh or torch.equal(values, before)
        assert same_bits(y, F.relu(bn.dense() + before))


OTHERS = {
    "rows": torch.randn(1, 6, 5, 7),
    "dtype": torch.randn(4, 6, 5, 7).double(),
    "layout": torch.randn(4, 5, 7, 6).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_the_kernel_does_not_take_goes_by_parts(other):
    term = ReluTerm(AddTerm(batch_norm((4, 6, 5, 7), torch.float32, 1, False), KeptTerm(Alias(other), False)))
    fused = FusedTerm.of(term)
    assert fused is not None and same_bits(fused.dense(), term.dense())


def test_without_factors_there_is_no_pass():
    plain = BatchNormTerm(Alias(torch.randn(2, 3, 4, 4)), torch.neg)
    kept = KeptTerm(Alias(torch.randn(2, 3, 4, 4)), False)
    assert FusedTerm.of(ReluTerm(plain)) is None and FusedTerm.of(ReluTerm(AddTerm(plain, kept))) is None


class Block(nn.Module):
    def __init__(self, down):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)) if down else nn.Identity()
        self.one, self.two = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.two(self.b(F.relu(self.one(self.a(x))))) + self.down(x))


def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_training_step_rebuilds_in_one_pass_where_that_is_exact(wrong, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Block(True), Block(False), nn.Conv2d(8, 2, 1))
    x = torch.randn(4, 3, 34, 34)
    want = step(model, x)
    monkeypatch.setattr(telling, "rebuild_candidates", lambda x: [*norm.KERNEL_CANDIDATES, norm._fused])
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


def test_rows_of_what_is_rebuilt_from_a_rebuild_make_no_more_of_that():
    x, asked = torch.arange(24.0).view(4, 6), []

    def build(rows):
        asked.append(rows)
        return x if rows is None else x[slice(*rows)]

    inner = RebuiltBody(build, 6)
    assert torch.equal(KeptTerm(inner, True).dense((1, 3)), x[1:3]) and asked == [(1, 3)]
    assert torch.equal(KeptTerm(inner, True).dense(), x) and asked[1:] == [None]
