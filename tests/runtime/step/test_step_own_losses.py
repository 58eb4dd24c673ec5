"""step in sub-batches: loss functions of the caller's own are means or sums over rows, or refused, in every step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.step.losses import ComparedLoss
from gistkit.runtime.step.row_independence import REMEDIES

ROWS, CLASSES = 8, 10


class Scaled(nn.Module):
    """Its inputs are its results."""

    def __init__(self, dtype=torch.float32, form=lambda out: out):
        super().__init__()
        self.scale, self.form = nn.Parameter(torch.ones((), dtype=dtype)), form

    def forward(self, x):
        return self.form(x * self.scale)


def batch(seed=0, rows=ROWS, dtype=torch.float32):
    """Results that are nearly alike, as a fresh network's."""
    torch.manual_seed(seed)
    return 0.01 * torch.randn(rows, CLASSES).to(dtype), torch.randint(CLASSES, (rows,))


def one_hot(out, t):
    return F.one_hot(t, CLASSES).to(out.dtype)


def in_place(out, t):
    out.sub_(t[:, None])
    return out.square().mean()


def distilled(out, t):
    """Its gradients are nothing but rounding: the softmax times the sum of its shares, less itself."""
    return -(out.softmax(1).detach() * out.log_softmax(1)).sum(1).mean()


class Counting(nn.Module):
    """Keeps a state, of which the comparison has a copy, and draws."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, out, t):
        self.calls += 1
        return F.cross_entropy(F.dropout(out, 0.5) + torch.randn_like(out), t)


MEANS = {
    "cross entropy": lambda out, t: F.cross_entropy(out, t),
    "in float32": lambda out, t: 1e-6 * F.cross_entropy(out.float(), t),
    "of terms that cancel": lambda out, t: out.mean(0).mean() - out.detach().mean(),
    "with a penalty": lambda out, t: F.l1_loss(out, one_hot(out, t)) + 0.1 * out.square().mean(),
    "no gradient": lambda out, t: F.cross_entropy(out.detach(), t) + 0 * out.sum(),
    "in place": in_place,
    "distilled": distilled,
    "module": Counting(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MEANS)
def test_means_over_rows_are_stepped(name, dtype):
    for seed in range(3):
        x, t = batch(seed, ROWS + seed, dtype)
        gistkit.step(Scaled(dtype), MEANS[name], x, t, sub_batches=2 + seed)
        summed = lambda out, t: MEANS[name](out, t) * len(out)  # noqa: E731
        gistkit.step(Scaled(dtype), summed, x, t, sub_batches=2 + seed, reduction="sum")


def ranked(out, t):
    score = out.sum(1)
    return F.softplus(score[:, None] - score).mean()


def shared_entropy(out, t):
    shares = out.softmax(1).mean(0)
    return (shares * shares.log()).sum()


def dice(out, t):
    shares, truth = out.softmax(1), one_hot(out, t)
    return 1 - 2 * (shares * truth).sum() / (shares.square().sum() + truth.sum())


OTHERS = {
    "weights": lambda out, t: F.cross_entropy(out, t, torch.arange(1.0, CLASSES + 1)),
    "ignored": lambda out, t: F.cross_entropy(out, t, ignore_index=int(t[0])),
    "masked": lambda out, t: (out.square().mean(1) * (t > 4)).sum() / (t > 4).sum(),
    "sum": lambda out, t: F.cross_entropy(out, t, reduction="sum"),
    "contrastive": lambda out, t: F.cross_entropy(10 * out @ out.T, torch.arange(len(out))),
    "norm": lambda out, t: out.sum() / out.sum().detach(),
    "root": lambda out, t: out.square().mean().sqrt(),
    "ranked": ranked,
    "shared": shared_entropy,
    "dice": dice,
}


@pytest.mark.parametrize("rows", [ROWS, 512])  # of many rows the means of the parts are nearly alike
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_refused(name, rows):
    for seed in range(3):
        for parts in (2, 4, 8):
            with pytest.raises(ValueError, match="step: loss_fn must return the mean over its rows"):
                gistkit.step(Scaled(), OTHERS[name], *batch(seed, rows), sub_batches=parts)


def test_the_text_has_the_numbers_and_the_remedy():
    with pytest.raises(ValueError) as raised:
        gistkit.step(Scaled(), OTHERS["sum"], *batch(), sub_batches=2)
    start, _, end = str(raised.value).partition(" it is ")
    assert start == (
        "step: loss_fn must return the mean over its rows (reduction='mean') for sub-batches to add up, and of 4 rows "
        "with made-up results"
    )
    assert end.split("; ")[1] == "pass reduction='sum' where it is the sum"
    assert end.endswith(
        f"the sum divided by the weight of the whole batch; one over pairs of rows has no parts; {REMEDIES}"
    )
    with pytest.raises(ValueError, match="loss_fn must return the sum over its rows"):
        gistkit.step(Scaled(), MEANS["cross entropy"], *batch(), sub_batches=2, reduction="sum")


def test_results_of_any_form():
    def loss_fn(out, t, weight=None):
        assert not out["ids"].dtype.is_floating_point and out["anchors"].shape == (3, 2)
        return F.cross_entropy(out["logits"][0], t, weight) + out["flat"].view(len(t), -1).square().mean()

    def form(out):
        return {"ids": out.argmax(1), "logits": (out, None), "flat": out.flatten(), "anchors": torch.ones(3, 2)}

    gistkit.step(Scaled(form=form), loss_fn, *batch(), sub_batches=2)
    with pytest.raises(ValueError, match="its gradients off by"):
        gistkit.step(Scaled(form=form), lambda out, t: loss_fn(out, t, torch.arange(10.0)), *batch(), sub_batches=2)


def test_what_cannot_be_compared_is_refused():
    def picky(out, t):
        assert out.max() < 0.1, "small results"
        return out.mean()

    with pytest.raises(ValueError) as raised:
        gistkit.step(Scaled(), picky, *batch(), sub_batches=2)
    assert str(raised.value) == (
        "step: loss_fn could not be compared with the mean over its rows (reduction='mean') on made-up results, "
        f"float32 between 0.1 and 0.9: AssertionError: small results; {REMEDIES}"
    )
    gistkit.step(Scaled(), picky, *batch(), sub_batches=2, verify=False)


def test_the_comparison_leaves_no_trace():
    model, counting, (x, t) = Scaled(), Counting(), batch()
    state, found = torch.get_rng_state(), []
    for check in (False, True):
        model.zero_grad()
        torch.set_rng_state(state)
        gistkit.step(model, counting, x, t, sub_batches=4, verify=check)
        penalised = lambda out, t: F.cross_entropy(out, t) + model.scale.square()  # noqa: E731
        gistkit.step(model, penalised, x, t, sub_batches=4, verify=check)
        found.append((model.scale.grad, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and counting.calls == 8


LENGTH = 6
WORDS = {
    "flat": lambda out, t: F.cross_entropy(out.flatten(0, -2), t.flatten()),
    "viewed": lambda out, t: F.cross_entropy(out.view(-1, out.size(-1)), t.view(-1), label_smoothing=0.1),
    "shifted": lambda out, t: F.cross_entropy(out[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)),
    "swapped": lambda out, t: F.cross_entropy(out.transpose(1, 2).float(), t),
}


def words(rows=ROWS):
    torch.manual_seed(0)
    return torch.randn(rows, LENGTH, CLASSES), torch.randint(CLASSES, (rows, LENGTH))


@pytest.mark.parametrize("name", WORDS)
def test_a_loss_that_only_reshapes_is_compared_in_its_first_step_alone(name):
    called, (x, t) = [], words()

    def loss_fn(out, targets):
        called.append(len(out))
        return WORDS[name](out, targets)

    for _ in range(3):
        gistkit.step(Scaled(), loss_fn, x, t, sub_batches=2)
    parts = [4, 4]
    assert called[:2] == parts and called[-4:] == parts * 2 and len(called) > 6
    first = len(called)
    gistkit.step(Scaled(), loss_fn, *words(ROWS + 2), sub_batches=2)  # of another size: once more
    assert len(called) > first + 2


@pytest.mark.parametrize("name", ["flat", "shifted", "swapped"])
def test_labels_that_are_ignored_in_a_later_step_are_seen(name):
    model, loss_fn, (x, t) = Scaled(), WORDS[name], words()
    gistkit.step(model, loss_fn, x, t, sub_batches=2)
    even = t.clone()
    even[:, 2] = -100
    gistkit.step(model, loss_fn, x, even, sub_batches=2)
    even[0, 3] = -100
    with pytest.raises(ValueError, match="step: loss_fn must return the mean over its rows"):
        gistkit.step(model, loss_fn, x, even, sub_batches=2)


NOT_ALONE = {
    "first rows": lambda out, t: F.cross_entropy(out[1:].flatten(0, -2), t[1:].flatten()),
    "mixed rows": lambda out, t: F.cross_entropy(out.transpose(0, 1).flatten(0, 1), t.flatten()),
    "weighted": lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten(), torch.arange(1.0, CLASSES + 1)),
    "of the mean": lambda out, t: F.cross_entropy((out - out.mean(0)).flatten(0, 1), t.flatten()),
    "scaled": lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten()) * len(out),
}


@pytest.mark.parametrize("name", NOT_ALONE)
def test_a_loss_that_does_more_is_compared_in_every_step(name, monkeypatch):
    monkeypatch.setattr(ComparedLoss, "_compare", lambda *_: compared.append(name))
    compared, loss_fn = [], NOT_ALONE[name]
    for _ in range(3):
        gistkit.step(Scaled(), loss_fn, *words(), sub_batches=2)
    assert len(compared) == 3
    gistkit.step(Scaled(), loss_fn, *words(), sub_batches=2, verify=False)
    assert len(compared) == 3


def test_a_length_that_makes_the_mean_another_is_refused_at_once():
    with pytest.raises(ValueError, match="step: loss_fn must return the mean over its rows"):
        smoothed = lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten(), label_smoothing=1 / len(out))  # noqa: E731
        gistkit.step(Scaled(), smoothed, *words(), sub_batches=2)
