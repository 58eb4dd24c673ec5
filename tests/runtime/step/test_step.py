"""step: sub-batches add up to the whole batch; cutting, weighting."""

from collections import UserDict, namedtuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.peaks import least_plan
from tests.support.step_cases import batch, net


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def stepped(model, *args, **kwargs):
    model.zero_grad()
    loss = gistkit.step(model, *args, **kwargs)
    return loss, gradients(model)


def plain(model, loss_fn, x, t):
    model.zero_grad()
    loss = loss_fn(model(**x) if isinstance(x, dict) else model(x), t)
    loss.backward()
    return loss.detach(), gradients(model)


def integers(model):
    """Small whole numbers: every sum is exact in float32, so that no order of summation matters."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    return model


def weighted(out, t):
    return (out * t).sum()


@pytest.mark.parametrize("compress", [False, True])
def test_one_sub_batch_is_the_plain_loop_bit_for_bit(compress):
    torch.manual_seed(0)
    model, (x, t) = net(), batch()
    want_loss, want = plain(model, F.cross_entropy, x, t)
    loss, got = stepped(gistkit.compress(model) if compress else model, F.cross_entropy, x, t)
    assert torch.equal(loss, want_loss) and not loss.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class OwnLoss(nn.Module):
    """As those of transformers: a batch of named tensors, the loss among the results."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": F.cross_entropy(out, labels), "logits": out}


def test_a_model_that_gives_its_own_loss_needs_no_targets():
    torch.manual_seed(0)
    model, (x, t) = OwnLoss(), batch()
    given = {"x": x, "labels": t}
    loss_fn = lambda out: out["loss"]  # noqa: E731
    want_loss, want = plain(model, lambda out, _: out["loss"], given, None)
    gistkit.compress(model, gistkit.plan(model, given, loss_fn=loss_fn, budget="100%"))
    for step in (partial(gistkit.step, model, loss_fn), gistkit.GraphedStep(model, loss_fn)):
        model.zero_grad()
        assert torch.equal(step(given), want_loss) and all(map(torch.equal, gradients(model), want))
    with pytest.raises(ValueError, match="rows of a batch must not depend on each other"):
        gistkit.step(model, loss_fn, given, sub_batches=2)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_loss_of_several_targets(parts):
    model, x = integers(net()), torch.randint(-2, 3, (7, 3, 8, 8)).float()
    t, scale = torch.randint(-2, 3, (7, 4)).float(), torch.randint(1, 3, (7, 4)).float()
    want_loss, want = plain(model, lambda out, t: (out * t * scale).sum(), x, t)
    several = lambda out, t, scale: (out * t * scale).sum()  # noqa: E731
    loss, got = stepped(model, several, x, t, scale, sub_batches=parts, reduction="sum")
    assert torch.equal(loss, want_loss) and all(map(torch.equal, got, want))


def test_targets_may_be_named():
    model, (x, t) = net(), batch()
    want = stepped(model, F.cross_entropy, x, t)
    for found in (stepped(model, F.cross_entropy, x, targets=t), stepped(model, F.cross_entropy, inputs=x, targets=t)):
        assert torch.equal(found[0], want[0]) and all(map(torch.equal, found[1], want[1]))
    assert torch.equal(gistkit.GraphedStep(model, F.cross_entropy)(x, targets=t), want[0])


@pytest.mark.parametrize("parts", [2, 3, 7, 100])
def test_sub_batches_sum_the_same_terms(parts):
    model, x = integers(net()), torch.randint(-2, 3, (7, 3, 8, 8)).float()
    t = torch.randint(-2, 3, (7, 4)).float()
    loss, got = stepped(model, weighted, x, t, sub_batches=parts, reduction="sum")
    want_loss, want = plain(model, weighted, x, t)
    assert torch.equal(loss, want_loss)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_gradients_accumulate_over_steps():
    model, x, t = integers(net()), torch.ones(4, 3, 8, 8), torch.ones(4, 4)
    _, once = stepped(model, weighted, x, t, sub_batches=2, reduction="sum")
    gistkit.step(model, weighted, x, t, sub_batches=2, reduction="sum")
    assert all(torch.equal(a, 2 * b) for a, b in zip(gradients(model), once, strict=True))


Pair = namedtuple("Pair", "left right")


class Several(nn.Module):
    """Takes inputs of many shapes, and notes the rows that it is given."""

    def __init__(self):
        super().__init__()
        self.linear, self.rows = nn.Linear(3, 2), []

    def forward(self, a, b=None, *, more=None, scale=1.0):
        self.rows.append(a.shape[0])
        return self.linear(a + (b if b is not None else 0) + (more.left + more.right[0] if more else 0)) * scale


def nested(n=5):
    a, b, c, d = (torch.randint(-2, 3, (n, 3)).float() for _ in range(4))
    return {"a": a, "b": b, "more": Pair(c, [d]), "scale": torch.tensor(2.0)}


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_nested_inputs_and_targets(parts):
    torch.manual_seed(0)
    model, inputs, targets = integers(Several()), nested(), {"y": torch.ones(5, 2), "power": 2}

    def loss_fn(out, t):
        return ((out - t["y"]) ** t["power"]).sum()

    for given in (inputs, UserDict(inputs)):
        loss, got = stepped(model, loss_fn, given, targets, sub_batches=parts, reduction="sum")
    want_loss, want = plain(model, loss_fn, inputs, targets)
    assert torch.equal(loss, want_loss) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert model.rows == 2 * {1: [5], 2: [2, 3], 5: [1] * 5}[parts] + [5]


def test_gradients_of_the_inputs_are_whole():
    model, (x, t) = integers(net()), batch(4)
    x = x.round().requires_grad_()
    gistkit.step(model, weighted, x, F.one_hot(t, 4).float(), sub_batches=3, reduction="sum")
    got, x.grad = x.grad, None
    weighted(model(x), F.one_hot(t, 4).float()).backward()
    assert torch.equal(got, x.grad)


def test_a_plan_of_sub_batches_from_budget_to_gradients():
    model = integers(net(16))
    x, t = torch.randint(-2, 3, (8, 3, 8, 8)).float(), torch.randint(-2, 3, (8, 4)).float()
    plan = least_plan(model, x, t, loss_fn=weighted, fidelity="reassociated")
    assert plan.sub_batches > 1
    want_loss, want = plain(model, weighted, x, t)
    twin = gistkit.compress(model, plan)
    loss, got = stepped(twin, weighted, x, t, reduction="sum", verify=False)  # for which the least budget has no room
    assert torch.equal(loss, want_loss) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_backward_runs_in_the_calling_thread():
    model, found = net(), []
    next(model.parameters()).register_hook(lambda _: found.append(torch.autograd.is_multithreading_enabled()))
    gistkit.step(model, F.cross_entropy, *batch())
    assert found == [False] and torch.autograd.is_multithreading_enabled()
