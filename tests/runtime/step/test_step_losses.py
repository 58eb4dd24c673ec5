"""step in sub-batches: the gradients of a loss tell what its values do not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit

ROWS, CLASSES, SEEDS = 8, 10, 30


class Scaled(nn.Module):
    """Its inputs are its results."""

    def __init__(self, dtype=torch.float32, form=lambda out: out):
        super().__init__()
        self.scale, self.form = nn.Parameter(torch.ones((), dtype=dtype)), form

    def forward(self, x):
        return self.form(x * self.scale)


def batch(seed, size=0.01, rows=ROWS, dtype=torch.float32):
    torch.manual_seed(seed)
    return (size * torch.randn(rows, CLASSES)).to(dtype), torch.randint(CLASSES, (rows,))


def one_hot(out, t):
    return F.one_hot(t, CLASSES).to(out.dtype)


def ranked(out, t):
    score = out.sum(1)
    return F.softplus(score[:, None] - score).mean()


def shared_entropy(out, t):
    shares = out.softmax(1).mean(0)
    return (shares * shares.log()).sum()


def refuses(loss_fn, x, t, parts=2, **options):
    with pytest.raises(ValueError, match="step: loss_fn must return the mean over its rows"):
        gistkit.step(Scaled(), loss_fn, x, t, sub_batches=parts, **options)


@pytest.mark.parametrize("parts", [2, 4])
def test_class_weights_are_refused_of_results_that_are_alike(parts):
    for seed in range(SEEDS):
        x, t = batch(seed)
        refuses(nn.CrossEntropyLoss(weight=torch.rand(CLASSES)), x, t, parts)


@pytest.mark.parametrize("parts", [2, 4])
def test_ignored_labels_are_refused_of_results_that_are_alike(parts):
    for seed in range(SEEDS):
        x, t = batch(seed)
        t[torch.randperm(ROWS)[: 1 + seed % 2 * 2]] = -100  # an odd number: not as many in each part
        refuses(F.cross_entropy, x, t, parts)


@pytest.mark.parametrize("loss_fn", [ranked, shared_entropy, lambda out, t: out.sum() / out.sum().detach()])
def test_pairs_of_rows_are_refused_of_results_that_are_alike(loss_fn):
    for seed in range(SEEDS):
        refuses(loss_fn, *batch(seed))


def test_the_text_tells_of_the_gradients():
    x, t = torch.zeros(ROWS, CLASSES), torch.arange(ROWS)
    with pytest.raises(ValueError, match=r"first 1 2.30259 and of the others 2.30259, its gradients off by \d\.\de-"):
        gistkit.step(Scaled(), nn.CrossEntropyLoss(weight=1 + torch.arange(10.0)), x, t, sub_batches=8)


def in_place(out, t):
    out.sub_(t[:, None])
    return out.square().mean()


def distilled(out, t):
    """Its gradients are nothing but rounding: the softmax times the sum of its shares, less itself."""
    return -(out.softmax(1).detach() * out.log_softmax(1)).sum(1).mean()


MEANS = {
    "cross entropy": F.cross_entropy,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "squares": lambda out, t: F.mse_loss(out, one_hot(out, t)),
    "absolute": lambda out, t: F.l1_loss(out, one_hot(out, t)),
    "binary": lambda out, t: F.binary_cross_entropy_with_logits(out, one_hot(out, t)),
    "small": lambda out, t: 1e-6 * F.cross_entropy(out.float(), t),
    "in place": in_place,
    "distilled": distilled,
    "no gradient": lambda out, t: F.cross_entropy(out.detach(), t) + 0 * out.sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MEANS)
def test_means_over_rows_are_stepped(name, dtype):
    for seed in range(4):
        for size in (0.0, 0.01, 1.0, 30.0, 300.0):
            x, t = batch(seed, size, ROWS + seed, dtype)
            gistkit.step(Scaled(dtype), MEANS[name], x, t, sub_batches=2 + seed % 3)


def test_nested_results_have_gradients_too():
    weights = torch.arange(1.0, CLASSES + 1)
    model, (x, t) = Scaled(form=lambda out: {"ids": out.argmax(1), "logits": (out, None)}), batch(0)
    with pytest.raises(ValueError, match="its gradients off by"):
        gistkit.step(model, lambda out, t: F.cross_entropy(out["logits"][0], t, weights), x, t, sub_batches=2)
    gistkit.step(model, lambda out, t: F.cross_entropy(out["logits"][0], t), x, t, sub_batches=2)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.mean()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("cannot be differentiated")


def test_a_loss_that_cannot_be_differentiated_is_known_by_its_values(recwarn):
    model, (x, t) = Scaled(), batch(0)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):  # by the step itself: it was not refused
        gistkit.step(model, lambda out, t: Once.apply(out), x, t, sub_batches=2)
    assert not recwarn.list


def test_a_penalty_on_parameters_leaves_no_trace():
    model, (x, t) = Scaled(), batch(0)
    calls, random_state = [], torch.get_rng_state()

    def loss_fn(out, t):
        calls.append(copy.copy(model.scale.grad))
        return F.cross_entropy(out, t) + 0.1 * model.scale.square()

    gistkit.step(model, loss_fn, x, t, sub_batches=2)
    assert calls[:-1] == [None] * (len(calls) - 1) and calls[-1] is not None
    assert torch.equal(torch.get_rng_state(), random_state)
