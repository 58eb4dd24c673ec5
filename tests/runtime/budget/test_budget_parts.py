"""Budgets that need sub-batches: the peaks of gistkit.step under its plan, every live byte counted, against prediction
and budget, for steps whose shapes do not tell what is made of rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import gistkit
from tests.support.peaks import least_bytes, peaks_of_steps

ROWS, CHANNELS, CLASSES = 8, 16, 5  # as many channels as two batches
LABELS = torch.arange(ROWS) % CLASSES


def conv(i, o=CHANNELS):
    return nn.Conv2d(i, o, 3, padding=1)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) * 0.1)


class Net(nn.Module):
    """Two convolutions, a linear, and what a function makes of them and of parameters."""

    def __init__(self, forward, a=None, b=None, **parameters):
        super().__init__()
        self.a, self.b, self.head, self.how = a or conv(3), b or conv(CHANNELS), nn.Linear(CHANNELS, CLASSES), forward
        for name, p in parameters.items():
            setattr(self, name, p)

    def forward(self, x):
        return self.head(self.how(self, x))

    def first(self, x):
        return F.relu(self.a(x))

    def weighted(self, x, weight):
        return F.relu(F.conv2d(self.first(x), weight, padding=1)).mean((2, 3))


class Scaled(torch.autograd.Function):
    """A weight that is made by no torch function call."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.exp() * w

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * (1 + w) * w.exp()


def residual(m, x):
    r = m.first(x)
    return F.relu(m.b(r) + r).mean((2, 3))


def twice(m, x):
    return F.relu(m.b(F.relu(m.b(m.first(x))))).mean((2, 3))


def after_tokens(m, tokens, x):
    return F.gelu(torch.cat([tokens, x], 1) @ m.w).mean(1)


NETS = {
    "a residual without a norm": lambda: Net(residual),
    "weight norm": lambda: Net(twice, parametrizations.weight_norm(conv(3))),
    "a weight of a custom function": lambda: Net(
        lambda m, x: m.weighted(x, Scaled.apply(m.w)), w=parameter(CHANNELS, CHANNELS, 3, 3)
    ),
}  # fmt: skip
SEQUENCES = {
    "a repeated token": lambda: Net(
        lambda m, x: after_tokens(m, m.t.repeat(len(x), 1, 1).tanh(), x),
        t=parameter(CHANNELS, CHANNELS), w=parameter(CHANNELS, CHANNELS),
    ),
    "places looked up for every row": lambda: Net(
        lambda m, x: F.gelu((x + m.t(torch.arange(CHANNELS).expand(len(x), CHANNELS))) @ m.w).mean(1),
        t=nn.Embedding(CHANNELS, CHANNELS), w=parameter(CHANNELS, CHANNELS),
    ),
    "a square mask": lambda: Net(
        lambda m, x: F.gelu((x @ m.w).transpose(1, 2) @ torch.ones(CHANNELS, CHANNELS).tril()).mean(2),
        w=parameter(CHANNELS, CHANNELS),
    ),
}  # fmt: skip


def of_step(make, x, loss_fn=F.cross_entropy):
    torch.manual_seed(0)
    return make(), x, LABELS, loss_fn


def images():
    return torch.randn(ROWS, 3, 16, 16)


CASES = {
    **{name: lambda make=make: of_step(make, images()) for name, make in NETS.items()},
    **{
        name: lambda make=make: of_step(make, torch.randn(ROWS, CHANNELS, CHANNELS)) for name, make in SEQUENCES.items()
    },
    "an expanded batch": lambda: of_step(lambda: Net(twice), torch.randn(ROWS, 1, 16, 16).expand(ROWS, 3, 16, 16)),
    "windows of one signal": lambda: of_step(lambda: Net(twice), torch.randn(ROWS, 3, 46).unfold(2, 16, 2)),
}


def plans(model, x, y, loss_fn, between):
    """Plans with the least budget and perhaps one in the middle."""
    ask = {"loss_fn": loss_fn, "density": 1.0, "hardware": "cpu", "fidelity": "reassociated"}
    plain_bytes = gistkit.plan(model, x, y, policy="plain", loss_fn=loss_fn, hardware="cpu").peak_bytes
    least = least_bytes(model, x, y, **ask)
    budgets = (least, (least + plain_bytes) // 2) if between else (least,)
    return [gistkit.plan(model, x, y, budget=budget, **ask) for budget in budgets]


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_predicted(name):
    model, x, y, loss_fn = CASES[name]()
    for plan in plans(model, x, y, loss_fn, name == "weight norm"):
        assert plan.sub_batches > 1
        twin = gistkit.compress(copy.deepcopy(model), plan)
        peaks = peaks_of_steps(twin, lambda twin=twin: gistkit.step(twin, loss_fn, x, y, verify=False), x, y)
        # what is left are the result, which gistkit.step does not hold, and single numbers
        assert 0.995 * plan.peak_bytes <= min(peaks) <= max(peaks) <= plan.peak_bytes <= plan.budget_bytes
