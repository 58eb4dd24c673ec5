"""step in sub-batches: the gradients of PyTorch's losses are those of the whole batch, whatever was accepted before.

In float64, where sums in another order differ by less than NEAR of the largest gradient.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gistkit
from gistkit.runtime.step.losses import known_share
from tests.support.step_cases import Concatenated, batch, net

ROWS, CLASSES, NEAR = 9, 4, 1e-11
NETWORKS = {"plain": net, "concatenated": Concatenated}
WEIGHT = torch.tensor([5.0, 0.1, 2.0, 0.0], dtype=torch.float64)
X, T = batch(ROWS)
X = X.double()


def some_ignored(label):
    """Labels of which a whole part of one, two or three rows, and another are ignored."""
    t = T.clone()
    t[:4] = t[6] = label
    return t


def accepted(network="plain"):
    """A model that took a step of the plainest kind."""
    torch.manual_seed(1)
    model = NETWORKS[network]().double()
    gistkit.step(model, F.cross_entropy, X + 1, T, sub_batches=3)
    return model


def assert_as_whole(model, loss_fn, t, sub_batches=3, **options):
    model.zero_grad()
    whole = copy.deepcopy(model)
    want = loss_fn(whole(X), t)
    want.backward()
    loss = gistkit.step(model, loss_fn, X, t, sub_batches=sub_batches, **options)
    assert abs(loss - want) <= NEAR * (1 + abs(want))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= NEAR * q.grad.abs().max()


OVER_CLASSES = {
    "mean": (nn.CrossEntropyLoss(), -100),
    "weight": (nn.CrossEntropyLoss(weight=WEIGHT), -100),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), -100),
    "smoothed": (nn.CrossEntropyLoss(WEIGHT, ignore_index=2, label_smoothing=0.1), 2),
    "smoothed sum": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, reduction="sum"), -100),
    "partial": (partial(F.cross_entropy, weight=WEIGHT), -100),
    "partial of partial": (partial(partial(F.cross_entropy, ignore_index=-1), label_smoothing=0.2), -1),
    "partial sum": (partial(F.cross_entropy, reduction="sum"), -100),
    "nll": (nn.NLLLoss(weight=WEIGHT), -100),
    "nll function": (partial(F.nll_loss, ignore_index=1), 1),
}
torch.manual_seed(3)
SHARES = torch.rand(ROWS, CLASSES, dtype=torch.float64).softmax(1)
SIGNS = (SHARES > 0.25).double() * 2 - 1
OVER_ELEMENTS = {
    "probabilities": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), SHARES),
    "probabilities sum": (partial(F.cross_entropy, reduction="sum"), SHARES),
    "mse": (F.mse_loss, SIGNS),
    "l1": (nn.L1Loss(), SIGNS),
    "smooth l1": (nn.SmoothL1Loss(beta=0.5), SIGNS),
    "huber": (partial(F.huber_loss, delta=0.3, reduction="sum"), SIGNS),
    "binary": (nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT), SIGNS.relu()),
    "kl": (nn.KLDivLoss(reduction="batchmean"), SHARES),
    "kl sum": (partial(F.kl_div, log_target=True, reduction="sum"), SHARES.log()),
    "poisson": (nn.PoissonNLLLoss(), SIGNS.relu()),
    "soft margin": (nn.SoftMarginLoss(), SIGNS),
    "hinge": (nn.HingeEmbeddingLoss(margin=0.4), SIGNS),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", OVER_CLASSES)
def test_losses_over_classes_after_an_accepted_step(network, name):
    model, (loss_fn, ignored) = accepted(network), OVER_CLASSES[name]
    for labels in (T, some_ignored(ignored), T):
        for parts in (2, 3, ROWS):
            assert_as_whole(model, loss_fn, labels, parts)


@pytest.mark.parametrize("name", OVER_ELEMENTS)
def test_losses_over_elements_after_an_accepted_step(name):
    model, (loss_fn, t) = accepted(), OVER_ELEMENTS[name]
    for parts in (2, 3, ROWS):
        assert_as_whole(model, loss_fn, t, parts)


@pytest.mark.parametrize("network", NETWORKS)
def test_closures_and_objects_that_change_after_an_accepted_step(network):
    """The code is the same; what it sees makes the difference."""
    seen = {}
    losses = [nn.CrossEntropyLoss(), lambda out, t: F.cross_entropy(out, t, **seen)]
    model = accepted(network)
    for loss_fn in losses:
        assert_as_whole(model, loss_fn, T)
    losses[0].weight = WEIGHT
    assert_as_whole(model, losses[0], T)
    for change, labels in (({"weight": WEIGHT}, T), ({"reduction": "sum"}, T), ({}, some_ignored(-100))):
        seen.clear()
        seen.update(change)
        with pytest.raises(ValueError, match="step: loss_fn must return the mean over its rows"):
            gistkit.step(model, losses[1], X, labels, sub_batches=3)
    seen["reduction"] = "sum"
    assert_as_whole(model, losses[1], some_ignored(-100), reduction="sum")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_low_precision(dtype, reduction):
    """Near what float32 makes of the same results; these, the sum, its division and gradients are rounded once each."""
    torch.manual_seed(0)
    model, t = nn.Linear(16, CLASSES, dtype=dtype), torch.randint(CLASSES, (300,))
    x = 1000 * torch.randn(300, 16, dtype=dtype)  # of a part the sum is more than float16 has
    t[:100] = -100
    whole, loss_fn = copy.deepcopy(model), nn.CrossEntropyLoss(reduction=reduction)
    want = loss_fn(whole(x).float(), t)
    want.backward()
    loss, near = gistkit.step(model, loss_fn, x, t, sub_batches=3), 8 * torch.finfo(dtype).eps
    assert abs(loss - want) <= near * want
    assert (model.weight.grad - whole.weight.grad).abs().max() <= near * whole.weight.grad.abs().max()


class HostReads(TorchDispatchMode):
    """Counts the reads that wait for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_no_known_loss():
    model = accepted()
    with HostReads() as reads:
        gistkit.step(model, nn.CrossEntropyLoss(weight=WEIGHT), X, some_ignored(-100), sub_batches=3)
    assert not reads.count


def test_what_known_losses_are_refused_for():
    one = nn.Sequential(nn.Flatten(), nn.Linear(192, 1)).double()
    with pytest.raises(ValueError) as raised:
        gistkit.step(one, F.mse_loss, X, T.double(), sub_batches=3)
    assert str(raised.value) == (
        "step: mse_loss must be given results of the targets' shape (3,), got shape (3, 1); others are broadcast, "
        "which compares rows with one another"
    )
    text = "step: reduction must be None or 'mean', which cross_entropy has here, got 'sum'; leave it out"
    with pytest.raises(ValueError, match=text):
        gistkit.step(accepted(), nn.CrossEntropyLoss(), X, T, sub_batches=3, reduction="sum")


class Subclass(nn.CrossEntropyLoss):
    """Not the class whose mean is known."""


def test_what_only_looks_like_a_known_loss():
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, given, loss: loss**2)
    by_row = (partial(F.binary_cross_entropy_with_logits, **{w: SHARES}) for w in ("weight", "pos_weight"))
    others = (partial(F.mse_loss, size_average=False), partial(F.cross_entropy, reduction="none"))
    for loss_fn in (Subclass(), hooked, *by_row, *others, lambda out, t: F.mse_loss(out, t)):
        assert known_share(loss_fn, SIGNS, (0, 3, 6, 9), None) is None
    assert known_share(F.cross_entropy, {"labels": T}, (0, 3, 6, 9), None) is None
