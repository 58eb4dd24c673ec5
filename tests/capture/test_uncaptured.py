"""What cannot be captured, or was put in another argument's place: which part, what it raised, what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.graphs import Apply, Unsaved
from tests.support.planning_cases import T, X, net
from tests.support.training import assert_same_gradients

STEP = {"backward": True}
LOSS = r"^loss_fn could not be captured on fake tensors, as a copy of Sequential returned them: "
CALLED = r"; it is called as loss_fn\(output, \*targets\), a plan's as loss_fn\(model\(batch\[0\]\), \*batch\[1:\]\)$"
LEAVE = r"or leave the plan out: gistkit.compress\(model\) records a real step$"
SIZES = r"makes a tensor whose size hangs on values \(indexing by a bool .* use torch.where, or the mask as a factor, "


def plan(model=None, *batch, **words):
    return gistkit.plan(model or net(), *(batch or (X, T)), **{"loss_fn": F.cross_entropy, **words})


def mine(*_):
    raise ZeroDivisionError("mine")


class Undone(Unsaved):
    @staticmethod
    def backward(ctx, grad):
        raise KeyError("undone")


def test_a_transformer_of_torch_is_told_whether_its_mask_is_causal():
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(4)
    with pytest.raises(gistkit.CaptureError, match="pass is_causal or tgt_is_causal, without which"):
        gistkit.capture(model, (torch.randn(2, 4, 8), mask))
    assert gistkit.capture(model, (torch.randn(2, 4, 8), mask), {"is_causal": True}).calls


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (mine, LOSS + "ZeroDivisionError: mine" + CALLED),
        (lambda out: out.sum(), LOSS + r"TypeError: .* takes 1 positional argument but 2 were given" + CALLED),
        (lambda out, t: F.cross_entropy(out, t[:3]), LOSS + r"ValueError: Expected input batch_size" + ".*" + CALLED),
        (lambda out, t: out.sum() * out.sum().item(), LOSS + ".*; the loss_fn asks a tensor for its values .*" + LEAVE),
        (lambda out, t: F.cross_entropy(out[t > 0], t[t > 0]), LOSS + r".*; the loss_fn " + SIZES + LEAVE),
        (lambda out, t: 1.0, r"^loss_fn must return a tensor with one element, got float; take the mean or the sum$"),
        (lambda out, t: out.detach().sum(), r"^the loss needs no gradient: .*; train one, or make the loss of what"),
        (
            lambda out, t: Undone.apply(out).sum(),
            r"^the backward of Sequential could not be captured on a copy of it: KeyError: 'undone'; mend it "
            r"where the model alone raises it too, " + LEAVE,
        ),
    ],
)
def test_what_a_loss_raises_is_not_the_forwards(loss_fn, text):
    with pytest.raises(gistkit.CaptureError, match=text):
        plan(loss_fn=loss_fn)


def test_sparse_gradients_have_no_storage_to_plan():
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(40, 10))
    with pytest.raises(gistkit.CaptureError, match=r"has no storage .* planned: make '0' with sparse=False, " + LEAVE):
        plan(model, torch.randint(20, (len(T), 5)), T)


def test_a_size_that_hangs_on_values():
    model = Apply(lambda m, x: (out := m[0](x))[out > 0].sum(), net())
    forward = r"^the forward of Apply could not be captured on a copy of it: "
    with pytest.raises(gistkit.CaptureError, match=forward + r"DynamicOutputShapeException: .*; the forward " + SIZES):
        gistkit.plan(model, X)
    # without a plan the first step is recorded, as the error says
    assert_same_gradients(model, lambda m, _: m(X), steps=2)


@pytest.mark.parametrize(
    ("batch", "words", "text"),
    [
        ((X, T), {"loss_fn": None},
         r"^plan: the batch must be what Sequential.forward takes, got 2 argument\(s\) for it \(too many positional "
         r"arguments\); without a loss_fn all of the batch goes there; pass loss_fn=..., which the items behind"),
        (((X, T),), {},
         r"^plan: the first item of the batch must be what Sequential.forward takes, got 2 argument\(s\) .*; pass "
         r"several inputs as a tuple, named ones as a dict, .* or leave loss_fn out where forward computes the loss"),
        (({"x": X}, T), {}, r"first item .* takes, got 1 argument\(s\) for it \(.*'input'\); pass several"),
        ((X, T, F.cross_entropy), {"loss_fn": None}, r"too many positional .*; budget and loss_fn go by name$"),
        ((X, T), {"density": {"1": 0.5}},
         r"density must have storage ids, whole numbers, as keys, got '1'; take those of plan.contract.densities"),
        ((X, T), {"density": {True: 0.5}}, r"density must have storage ids, .*, got True"),
    ],
)  # fmt: skip
def test_arguments_in_the_place_of_others(batch, words, text):
    with pytest.raises(TypeError, match=text):
        plan(net(), *batch, **words)


@pytest.mark.parametrize(
    ("args", "words", "kind", "text"),
    [
        ((X,), {}, TypeError,
         r"args must be a tuple, one item for each argument, got Tensor; put it into one: args=\(x,"),
        (((X,), [T]), {}, TypeError, r"kwargs must be a dict of the forward's arguments by name, got list; positional"),
        (((X,),), {"loss_fn": 3, **STEP}, TypeError, r"loss_fn must be callable, got int; pass a function of"),
        (((X,),), {"targets": T, **STEP}, TypeError,
         r"targets must be a tuple, one item for each argument, got Tensor; put it into one: targets=\(x,\)"),
        (((X,),), {"loss_fn": mine}, ValueError,
         r"loss_fn needs backward=True, got backward=False; without a backward there is no loss"),
        (((X,),), {"fake": False, **STEP}, ValueError,
         r"backward=True needs fake=True, got fake=False; a real step is recorded forward only"),
    ],
)  # fmt: skip
def test_capture_with_arguments_in_the_place_of_others(args, words, kind, text):
    with pytest.raises(kind, match="^capture: " + text):
        gistkit.capture(net(), *args, **words)
