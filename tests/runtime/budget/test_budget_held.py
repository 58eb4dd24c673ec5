"""Budgets count what a loop holds until its step ends: outputs, gradients of inputs, weights made in the step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.nn_cases import same_bits
from tests.support.peaks import held_step, least_bytes, least_plan, peaks_of_steps, unchecked_peak
from tests.support.plan_cases import LINKED

FROZEN = {
    "convolutions' weights": lambda name: name in ("0.weight", "3.weight"),
    "all but the last": lambda name: not name.startswith("7."),
    "all but the first": lambda name: name != "0.weight",
}


def conv(i, o, k=3):
    return nn.Conv2d(i, o, k, padding=k // 2)


class Head(nn.Module):
    """A segmentation head, and what else models return beside it; or branches that lead nowhere."""

    def __init__(self, kind):
        super().__init__()
        self.body = nn.Sequential(conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16), nn.ReLU())
        self.head, self.dead, self.kind = conv(16, 21, 1), conv(16, 4, 1), kind

    def forward(self, x):
        features = self.body(x)
        held = (torch.sigmoid(features) * features, self.dead(features)) if self.kind == "dead branches" else None
        out = self.head(features)
        del held
        return {
            "dead branches": lambda: out,
            "features": lambda: {"out": out, "features": features},
            "in place": lambda: [F.relu_(out)],
            "views": lambda: (out[:, 1:], x[:, 1:], next(self.parameters()).view(-1)),
            "unread": lambda: (out, torch.sigmoid(F.relu(self.head(features))) * 2),
        }[self.kind]()


def first_of(out, y):
    out = next(iter(out.values())) if isinstance(out, dict) else out
    return F.cross_entropy(out if isinstance(out, torch.Tensor) else out[0], y)


def peaks(model, loss_fn, x, y):
    """(gradients, peaks) of two steps of a loop, from no gradients; those of x beside the parameters'."""

    def step():
        x.grad = None
        held_step(model, loss_fn, x, y)

    found = peaks_of_steps(model, step, x, y)
    return [t.grad for t in (*model.parameters(), x) if t.grad is not None], found


def assert_kept(model, loss_fn, x, y):
    """The least budget is kept, and predicted to the byte but for the first step's comparing; plain to the byte."""
    ask = {"loss_fn": loss_fn, "density": 1.0}
    expected, measured = peaks(copy.deepcopy(model), loss_fn, x, y)
    plain = gistkit.plan(model, x, y, policy="plain", **ask)
    assert measured == [plain.peak_bytes] * 2
    plan = least_plan(model, x, y, **ask)
    grads, measured = peaks(gistkit.compress(copy.deepcopy(model), plan), loss_fn, x, y)
    assert max(measured) <= plan.peak_bytes <= plan.budget_bytes
    assert measured[1] == unchecked_peak(plan, model, x, y, **ask)
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("kind", ["features", "in place", "views", "unread", "dead branches"])
def test_outputs_are_held_until_the_step_ends(kind):
    assert_kept(Head(kind), first_of, torch.randn(4, 3, 16, 16), torch.randint(20, (4, 16, 16)))


@pytest.mark.parametrize(
    ("policy", "on"), [("gist", "cpu"), ("modnn", "cpu"), ("checkpoint", "cpu"), ("vdnn-all", LINKED), ("cdma", LINKED)]
)
def test_policies_of_papers_leave_outputs_to_the_loop(policy, on):
    model, x, y = Head("unread"), torch.randn(4, 3, 16, 16), torch.randint(20, (4, 16, 16))
    plan = gistkit.plan(model, x, y, policy=policy, loss_fn=first_of, density=1.0, hardware=on)
    expected, _ = peaks(copy.deepcopy(model), first_of, x, y)
    grads, measured = peaks(gistkit.compress(model, plan), first_of, x, y)
    assert measured[1] == plan.peak_bytes
    assert all(same_bits(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("first", [conv(64, 4, 1), nn.Sequential(nn.ReLU(), conv(32, 8))])
def test_a_gradient_of_the_input_is_counted(first):
    width = next(m for m in first.modules() if isinstance(m, nn.Conv2d))
    tail = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width.out_channels, 5)]
    model, x = nn.Sequential(first, *tail), torch.randn(4, width.in_channels, 16, 16)
    assert_kept(model, F.cross_entropy, x.requires_grad_(), torch.arange(4))


def test_a_batch_that_needs_a_gradient_is_not_cut_and_holds_for_no_other():
    model = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 5))
    x, y = torch.randn(4, 3, 16, 16, requires_grad=True), torch.arange(4)
    ask = {"loss_fn": F.cross_entropy, "fidelity": "reassociated"}
    least = []
    for batch in (x, x.detach()):
        least.append(least_bytes(model, batch, y, **ask))
    plan = gistkit.plan(model, x, y, budget=least[0], **ask)
    assert plan.sub_batches == 1 and least[1] < least[0]
    assert gistkit.plan(model, x.detach(), y, budget=least[1], **ask).sub_batches > 1
    with pytest.raises(gistkit.PlanMismatchError, match="inputs that need gradients"):
        gistkit.step(gistkit.compress(model, plan), F.cross_entropy, x.detach(), y)


@pytest.mark.parametrize("part", FROZEN)
def test_frozen_parts(part):
    layers = [conv(3, 64), nn.BatchNorm2d(64), nn.ReLU(), conv(64, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[part](name))
    # weights are larger than maps, so that a gradient that nobody asked for shows
    assert_kept(model, F.cross_entropy, torch.randn(4, 3, 6, 6), torch.arange(4))


@pytest.mark.parametrize("fidelity", ["bitwise", "reassociated"])
def test_one_that_is_used_several_times_keeps_a_budget(fidelity):
    """A large linear, whose weight's gradients are summed when the node that made them has let go of its bias's."""
    again = nn.Linear(64, 64)
    model = nn.Sequential(again, nn.ReLU(), again, nn.Tanh(), again, nn.ReLU(), again, nn.Tanh(), nn.Linear(64, 3))
    x, y = torch.randn(32, 64), torch.arange(32) % 3
    plan = least_plan(model, x, y, loss_fn=F.cross_entropy, fidelity=fidelity, density=1.0)
    held_step(model, F.cross_entropy, x, y)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    in_parts = plan.sub_batches > 1
    step = gistkit.step if in_parts else held_step
    peaks = peaks_of_steps(twin, lambda: step(twin, F.cross_entropy, x, y), x, y)
    assert max(peaks) <= plan.peak_bytes <= plan.budget_bytes
    if not in_parts:
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
