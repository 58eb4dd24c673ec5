"""Rebuilds in one pass whose launch is made once: the bits of what is made anew each time, in every geometry."""

import pytest
import torch

from gistkit.kernels.launch import direct
from gistkit.nn.keep import Alias
from gistkit.runtime.calls.one_pass import OnePass, OnePassBody
from gistkit.runtime.rebuild.rebuild import BatchNormTerm, builder, fused
from tests.kernels.test_rebuild import batch_norm
from tests.support.nn_cases import DTYPES, same_bits

RECIPES = [
    ("relu", ("bn", 1)),
    ("relu", ("add", ("bn", 1), ("stash", 5))),
    ("relu", ("add", ("stash", 5), ("bn", 1))),
    ("relu", ("add", ("bn", 1), ("bn", 2))),
    ("relu", ("add", ("stash", 5), ("stash", 5))),
]
SHAPE = (4, 6, 5, 7)


class Fresh(Alias):
    """A stash that is decoded into memory of its own."""

    fresh = True

    def dense(self):
        return super().dense().clone()


def step(seed, dtype=torch.float32, last=False, form="scaled", shape=SHAPE):
    """(batch norms by call, what is kept by storage) of one step."""
    norms = {n: batch_norm(shape, dtype, seed + n, last, form) for n in (1, 2)}
    values = batch_norm(shape, dtype, seed + 3, last).kept.dense()
    return norms, {5: Alias(values)}


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_gives_what_is_made_anew(recipe, dtype, last):
    maker = None
    for seed in range(3):
        norms, kept = step(seed, dtype, last)
        kept = kept if seed else {5: Fresh(kept[5].dense())}
        term = fused(recipe, norms, kept.get)
        y = term.dense()
        maker = maker or OnePass(recipe, y)
        body = maker.body(norms, kept.get)
        assert body.is_like(y) and body(y) is body and body.nbytes == 0
        for _ in range(2):  # a kept tensor is not overwritten
            assert same_bits(body.dense(), y) and body.dense().stride() == y.stride()
        assert (
            same_bits(body.dense_range(SHAPE[1] * 35, 3 * SHAPE[1] * 35), builder(term, y)(None)[1:3].reshape(-1))
            or last
        )
        grad = torch.randn(SHAPE).to(dtype)
        assert same_bits(body.relu_backward(grad), torch.ops.aten.threshold_backward(grad, y, 0))


def test_which_recipes_it_takes():
    assert [OnePass.takes(r) for r in RECIPES] == [True, True, True, True, False]
    assert not OnePass.takes(("relu", ("relu", ("bn", 1))))


def test_what_is_not_there_has_no_body():
    norms, kept = step(0)
    y = torch.empty(SHAPE)
    for recipe in RECIPES[:4]:
        maker = OnePass(recipe, y)
        assert type(maker.body(norms, kept.get)) is OnePassBody
        assert maker.body({}, kept.get) is None and maker.body({2: norms[2]}, kept.get) is None
    assert OnePass(RECIPES[1], y).body(norms, {}.get) is None
    plain = {n: BatchNormTerm(term.kept, torch.neg) for n, term in norms.items()}
    assert all(OnePass(r, y).body(plain, kept.get) is None for r in RECIPES[:4])
    assert OnePass(RECIPES[3], y).body({1: norms[1], 2: plain[2]}, kept.get) is None


@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[3]], ids=str)
def test_another_arithmetic_is_another_launch(recipe):
    maker, bodies = OnePass(recipe, torch.empty(SHAPE)), []
    for form in ("scaled", "scaled", "centred"):
        norms, kept = step(0, form=form)
        bodies.append(maker.body(norms, kept.get))
        assert same_bits(bodies[-1].dense(), fused(recipe, norms, kept.get).dense())
    assert bodies[0]._launch is bodies[1]._launch is not bodies[2]._launch


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=str)
def test_inputs_of_another_geometry_go_by_parts(recipe, monkeypatch):
    norms, kept = step(0)
    y = fused(recipe, norms, kept.get).dense()
    maker = OnePass(recipe, y)
    x = norms[1].kept.dense()
    norms[1] = BatchNormTerm(Alias(x.contiguous(memory_format=torch.channels_last)), norms[1].apply)
    monkeypatch.setattr(direct.Rebuilds, "__call__", None)
    body = maker.body(norms, kept.get)
    assert same_bits(body.dense(), y) and body.dense().stride() == y.stride()


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=str)
def test_a_tensor_that_was_written_to_is_refused(recipe):
    norms, kept = step(0)
    body = OnePass(recipe, torch.empty(SHAPE)).body(norms, kept.get)
    body.dense()
    written = norms[1].kept if recipe is RECIPES[0] else kept[5]
    written._x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        body.dense()
