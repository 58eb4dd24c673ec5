"""Batch norms that keep their input in a narrow format: by PyTorch's node, step after step by launches made once."""

import copy

import pytest
import torch

import gistkit
from gistkit.ir.plan import Decision
from gistkit.runtime.calls import fast_norm, native
from gistkit.runtime.calls.narrow_body import NarrowBody, Narrowing
from tests.support.fast_cases import Net, image, step
from tests.support.nn_cases import same_bits


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return Net()


def stepped(model, steps=8):
    return [step(model, image(seed=seed)) for seed in range(steps)]


def nodes(y):
    """The names of the backward nodes behind y."""
    seen, pending = {y.grad_fn}, [y.grad_fn]
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


@pytest.mark.parametrize("lossy", ["fp8", "fp8s", "fp10", "fp16s", "fp16"])
def test_the_same_bits_as_by_gistkits_own_node(plain, lossy, monkeypatch):
    ours = gistkit.compress(copy.deepcopy(plain), lossy=lossy)
    found = stepped(ours)
    monkeypatch.setattr(native, "keeps_otherwise", lambda *_: False)
    want = stepped(gistkit.compress(copy.deepcopy(plain), lossy=lossy))
    assert all(same_bits(a, b) for f, w in zip(found, want, strict=True) for a, b in zip(f, w, strict=True))


@pytest.mark.parametrize("lossy", ["fp8", "fp8s"])
def test_narrow_launches_are_made_once_and_give_the_codecs_bits(plain, lossy, monkeypatch):
    made = []
    monkeypatch.setattr(Narrowing, "__call__", lambda self, x, real=Narrowing.__call__: made.append(x) or real(self, x))
    ours = gistkit.compress(copy.deepcopy(plain), lossy=lossy)
    found = stepped(ours)
    assert len(made) >= 5, "five batch norms, in the steps that go the short way"
    monkeypatch.setattr(fast_norm.Narrowing, "of", lambda *_: None)
    want = stepped(gistkit.compress(copy.deepcopy(plain), lossy=lossy))
    assert all(same_bits(a, b) for f, w in zip(found, want, strict=True) for a, b in zip(f, w, strict=True))


def test_the_node_is_pytorchs_and_lets_go_of_what_it_kept(plain, monkeypatch):
    ours = gistkit.compress(plain, lossy="fp8")
    stepped(ours)
    bodies = []
    real = NarrowBody.__init__
    monkeypatch.setattr(NarrowBody, "__init__", lambda self, *args: bodies.append(self) or real(self, *args))
    held = []
    apply = native.Once.dense
    monkeypatch.setattr(native.Once, "dense", lambda self: held.append(self) or apply(self))
    loss = ours(image()).sum()
    names = [n.name() for n in nodes(loss)]
    assert names.count("NativeBatchNormBackward0") == 5 and "_BatchNormBackward" not in names
    loss.backward(retain_graph=True)
    assert len(bodies) == len(held) == 5 and all(body.nbytes == body.encoded.nbytes for body in bodies)
    assert all(once._kept is not None for once in held)
    loss.backward()
    assert all(once._kept is None for once in held)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        held[0].dense()


def test_only_codes_of_whole_bytes_with_scales_of_their_own():
    x = torch.randn(2, 3, 4, 4)
    for codec, able in (
        ("fp8", True),
        ("fp8s", True),
        ("fp16", True),
        ("fp10", False),
        ("fp8t", False),
        ("zvc", False),
    ):
        assert (Narrowing.of(Decision(0, codec), x) is not None) is able, codec
    assert Narrowing.of(Decision(0, "fp8", "host"), x) is None
    assert Narrowing.of(Decision(0, "fp8"), x[1:]) is None, "a view of a part of a storage"
