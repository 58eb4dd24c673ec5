"""Budgets that need sub-batches, in steps whose shapes do not tell what is made of rows; forwards of fewer rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import gistkit
from gistkit.runtime import engine
from tests.support.graphs import Apply
from tests.support.peaks import held_step, least_bytes, least_plan, peaks_of_steps

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


NETS = {
    "a residual without a norm": lambda: Net(residual),
    "weight norm": lambda: Net(twice, parametrizations.weight_norm(conv(3))),
    "a weight of a custom function": lambda: Net(
        lambda m, x: m.weighted(x, Scaled.apply(m.w)), w=parameter(CHANNELS, CHANNELS, 3, 3)
    ),
}  # fmt: skip
SEQUENCES = {
    "a repeated token": lambda: Net(
        lambda m, x: F.gelu(torch.cat([m.t.repeat(len(x), 1, 1).tanh(), x], 1) @ m.w).mean(1),
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


def of_step(make, x):
    torch.manual_seed(0)
    return make(), x, LABELS


CASES = {
    **{name: lambda make=make: of_step(make, torch.randn(ROWS, 3, 16, 16)) for name, make in NETS.items()},
    **{
        name: lambda make=make: of_step(make, torch.randn(ROWS, CHANNELS, CHANNELS)) for name, make in SEQUENCES.items()
    },
    "an expanded batch": lambda: of_step(lambda: Net(twice), torch.randn(ROWS, 1, 16, 16).expand(ROWS, 3, 16, 16)),
    "windows of one signal": lambda: of_step(lambda: Net(twice), torch.randn(ROWS, 3, 46).unfold(2, 16, 2)),
}


def plans(model, x, y, between):
    """Plans with the least budget and perhaps one in the middle."""
    ask = {"loss_fn": F.cross_entropy, "density": 1.0, "hardware": "cpu", "fidelity": "reassociated"}
    plain_bytes = gistkit.plan(model, x, y, policy="plain", loss_fn=F.cross_entropy, hardware="cpu").peak_bytes
    least = least_bytes(model, x, y, **ask)
    budgets = (least, (least + plain_bytes) // 2) if between else (least,)
    return [gistkit.plan(model, x, y, budget=budget, **ask) for budget in budgets]


def peaks_under(plan, model, x, y, loss_fn):
    """The peaks of two steps under a plan."""
    twin = gistkit.compress(copy.deepcopy(model), plan)
    return peaks_of_steps(twin, lambda: gistkit.step(twin, loss_fn, x, y, verify=False), x, y)


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_predicted(name):
    model, x, y = CASES[name]()
    for plan in plans(model, x, y, name == "weight norm"):
        assert plan.sub_batches > 1
        peaks = peaks_under(plan, model, x, y, F.cross_entropy)
        # what is left are the result, which gistkit.step does not hold, and single numbers
        assert 0.995 * plan.peak_bytes <= min(peaks) <= max(peaks) <= plan.peak_bytes <= plan.budget_bytes


def encoder():
    """PyTorch's attention asks for a batch of one row, and goes without a view then."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return Apply(lambda m, x, mask=None: m[0](x, mask), layer)


def squared(y, _):
    return y.square().mean()


def test_single_rows_that_go_another_way_are_no_sub_batches():
    model, x, targets = encoder(), torch.randn(7, 5, 16), torch.zeros(7)
    plan = least_plan(model, x, targets, loss_fn=squared, fidelity="reassociated")
    assert plan.sub_batches == 3 and max(peaks_under(plan, model, x, targets, squared)) <= plan.peak_bytes


def test_what_is_not_cut_along_rows_stays_whole():
    """A mask of the sequence's length has no rows of the batch."""
    model, inputs, targets = encoder(), (torch.randn(6, 5, 16), torch.zeros(5, 5)), torch.zeros(6)
    plan = least_plan(model, inputs, targets, loss_fn=squared, fidelity="reassociated")
    assert plan.sub_batches == 1 and peaks_under(plan, model, inputs, targets, squared)


def normed():
    """A batch norm between convolutions; each row goes as the batch does but for the statistics."""
    norms = (nn.Conv2d(3, 18, 3), nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 9, 3), nn.BatchNorm2d(9), nn.ReLU())
    return nn.Sequential(*norms, nn.Flatten(), nn.Linear(9 * 12 * 12, 4))


def test_batch_norms_see_parts_only_where_plan_and_step_are_told():
    model, x, targets = normed(), torch.randn(8, 3, 16, 16), torch.zeros(8)
    words = {"fidelity": "reassociated", "loss_fn": squared}
    budget = least_bytes(model, x, targets, **words)
    assert gistkit.plan(model, x, targets, budget=budget, **words).sub_batches == 1
    accepted = {**words, "per_sub_batch_norm": True}
    plan = gistkit.plan(model, x, targets, budget=int(budget * 0.8), **accepted)
    assert plan.sub_batches > 1 and plan.lower_bound_bytes < budget
    twin = gistkit.compress(copy.deepcopy(model), plan)
    with pytest.raises(ValueError, match="a batch norm must see the whole batch"):
        gistkit.step(twin, squared, x, targets)

    def step(of=twin, parts=None):
        return gistkit.step(of, squared, x, targets, sub_batches=parts, per_sub_batch_norm=True, verify=False)

    assert max(peaks_of_steps(twin, step, x, targets)) <= plan.peak_bytes
    for _ in range(2):  # the running statistics have seen two steps
        model.zero_grad(set_to_none=True)
        step(model, plan.sub_batches)
    # Sums in another order, of at most 8 * 14 * 14 terms: 1568 roundings of 2**-24 are below 1e-4 of what is added.
    for mine, plain in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine.grad, plain.grad, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(twin.buffers(), model.buffers(), strict=True))


def smooth():
    """Convolutions with SiLUs, which gistkit has no operators for."""
    torch.manual_seed(0)
    layers = [m for i in range(4) for m in (nn.Conv2d(8 if i else 3, 8, 3, padding=1), nn.SiLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


@pytest.fixture
def captures(monkeypatch):
    """The number of rows of every forward that a given plan was compiled for."""
    seen = []
    compiled = engine.given_program

    def given_program(plan, model, args, kwargs):
        seen.append(len(args[0]))
        return compiled(plan, model, args, kwargs)

    monkeypatch.setattr(engine, "given_program", given_program)
    return seen


def test_fewer_rows_take_less(captures):
    """An epoch's last batch. What PyTorch's own ops save is known by its shape, so it is captured for itself."""
    model, x = smooth(), torch.randn(ROWS, 3, 16, 16)
    plan = least_plan(model, x, LABELS, loss_fn=F.cross_entropy, density=1.0)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for rows in (3, 8, 3):
        part, labels = x[:rows].clone(), LABELS[:rows].clone()
        peaks = peaks_of_steps(twin, lambda p=part, t=labels: held_step(twin, F.cross_entropy, p, t), part, labels)
        model.zero_grad()
        held_step(model, F.cross_entropy, part, labels)
        # parameters and their gradients are less than a seventh of the plan's peak; all else is in proportion
        assert max(peaks) <= plan.peak_bytes * (rows / ROWS + 1 / 7)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert captures == [3, 8]
