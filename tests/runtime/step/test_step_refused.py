"""step: what is refused, by its text."""

from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.step_cases import batch, net


def normed():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))


def test_batch_norm_in_training_is_refused():
    model, (x, t) = normed(), batch()
    with pytest.raises(ValueError) as raised:
        gistkit.step(model, F.cross_entropy, x, t, sub_batches=2)
    assert str(raised.value) == (
        "step: a batch norm must see the whole batch, and '1' in training mode would see 2 sub-batches, each with its "
        "own statistics; accept that with per_sub_batch_norm=True, or pass sub_batches=1, or plan without "
        'sub-batches (fidelity="bitwise"), or put it into eval mode'
    )
    assert all(p.grad is None for p in model.parameters()) and model[1].num_batches_tracked == 0
    gistkit.step(model, F.cross_entropy, x, t)
    assert model[1].num_batches_tracked == 1
    gistkit.step(model, F.cross_entropy, x, t, sub_batches=2, per_sub_batch_norm=True)
    assert model[1].num_batches_tracked == 3
    model[1].eval()
    gistkit.step(model, F.cross_entropy, x, t, sub_batches=2)
    assert model[1].num_batches_tracked == 3
    model[1] = nn.BatchNorm2d(4, track_running_stats=False).eval()
    with pytest.raises(ValueError, match="'1' in training mode would see 7 sub-batches"):
        gistkit.step(model, F.cross_entropy, x, t, sub_batches=7)


X, T = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
CE = F.cross_entropy
TWO = {"sub_batches": 2}
WRONG = [
    ((F.relu, CE, X, T), {}, TypeError, r"step: model must be a torch.nn.Module, got .*; pass the module"),
    ((None, X, T, CE), {}, TypeError, r"loss_fn must be callable, got Tensor; the order is step\(model, "),
    ((None, CE, X, T), {"sub_batches": 0}, ValueError, r"sub_batches must be None \(as planned\) or an int"),
    ((None, CE, X, T), {"sub_batches": 2.0}, ValueError, r"got 2.0; leave it out"),
    ((None, CE, X, T), {"reduction": "none"}, ValueError, r"reduction must be None, 'mean' or 'sum', got 'none'"),
    ((None, CE, X, T), {"per_sub_batch_norm": "yes"}, TypeError, r"must be True or False, got 'yes'"),
    ((None, CE, X, T), {"batch_statistics": "per_sub_batch"}, TypeError, r"; write per_sub_batch_norm=True"),
    ((None, CE, X, T), {"check": False}, TypeError, r"step: check= is called verify= now; write verify="),
    ((None, CE, X, T), {"verify": "no"}, TypeError, r"verify must be True or False, got 'no'; False takes"),
    ((None, CE, X, T[:3]), TWO, ValueError, r"tensor of targets must have the batch's 4 rows to be cut up, got shape "),
    ((None, CE, (X, T[:3]), T), TWO, ValueError, r"every tensor of inputs must have the batch's 4 rows"),
    (
        (None, CE, X, UserDict(t=T)),
        TWO,
        TypeError,
        r"targets must hold tensors, numbers and texts in tuples, .*UserDict",
    ),
    ((None, lambda out, t: out, X, T), {}, ValueError, r"with one element, got shape \(4, 4\); take its mean or sum"),
    ((None, lambda out, t: 1.0, X, T), TWO, ValueError, r"loss_fn must return a tensor with one element, got float"),
]


@pytest.mark.parametrize(("arguments", "options", "kind", "text"), WRONG)
def test_wrong_arguments(arguments, options, kind, text):
    model, *rest = arguments
    with pytest.raises(kind, match=text):
        gistkit.step(net() if model is None else model, *rest, **options)
