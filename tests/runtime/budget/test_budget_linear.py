"""Budgets kept by linear layers: used several times, with weights that are made in the step, under autocast."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import gistkit
from tests.support.peaks import held_step, peaks_of_steps


class Repeated(nn.Module):
    """A linear used several times, with more parameters than activations."""

    def __init__(self, width, times):
        super().__init__()
        torch.manual_seed(0)
        self.again, self.head, self.times = nn.Linear(width, width), nn.Linear(width, 3), times

    def forward(self, x):
        for i in range(self.times):
            x = torch.tanh(self.again(x)) if i % 2 else F.relu(self.again(x))
        return self.head(x)


def least(model, x, y, **asked):
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, y, budget=1, **asked)
    return refused.value.least_bytes[asked.get("fidelity", "bitwise")]


def assert_same(model, twin):
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize("fidelity", ["bitwise", "reassociated"])
@pytest.mark.parametrize(("width", "times"), [(16, 2), (58, 3), (128, 5)])
def test_one_that_is_used_several_times_keeps_a_budget(width, times, fidelity):
    """Its weight's gradients are summed when the node that made them has let go of its bias's."""
    model, x, y = Repeated(width, times), torch.randn(64, width), torch.arange(64) % 3
    asked = {"loss_fn": F.cross_entropy, "fidelity": fidelity, "density": 1.0}
    lowest = least(model, x, y, **asked)
    held_step(model, F.cross_entropy, x, y)
    for budget in (lowest, int(1.03 * lowest), int(1.1 * lowest)):
        plan = gistkit.plan(model, x, y, budget=budget, **asked)
        twin = gistkit.compress(copy.deepcopy(model), plan)
        in_parts = plan.sub_batches > 1
        step = gistkit.step if in_parts else held_step
        peaks = peaks_of_steps(twin, lambda t=twin, s=step: s(t, F.cross_entropy, x, y), x, y)
        assert max(peaks) <= plan.peak_bytes <= budget
        if not in_parts:
            assert_same(model, twin)


class Sliced(nn.Module):
    """A linear by a slice of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 48) / 5)
        self.first, self.head = nn.Linear(24, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.head(F.relu(F.linear(F.relu(self.first(x)), self.weight[:, :24])))


def perceptron():
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(96, 96), nn.ReLU())), nn.Linear(96, 5))


MADE = {
    "casts of weights": (perceptron, 96, True),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(96, 96)), *perceptron()), 96, False),
    "a slice's cast": (Sliced, 24, True),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("budget", ["100%", "95%", None])
def test_a_weight_made_in_the_step_goes_where_no_input_gradient_reads_it(name, budget):
    make, width, narrow = MADE[name]
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(256, width), torch.arange(256) % 5
    context = (lambda: torch.autocast("cpu", torch.bfloat16)) if narrow else contextlib.nullcontext
    asked = {"loss_fn": F.cross_entropy, "density": 1.0}

    def step(module):
        with context():
            loss = F.cross_entropy(module(x), y)
        loss.backward()

    with context():
        plan = gistkit.plan(model, x, y, budget=budget or least(model, x, y, **asked), **asked)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert max(peaks_of_steps(twin, lambda: step(twin), x, y)) <= plan.peak_bytes <= plan.budget_bytes
    model.zero_grad()
    step(model)
    assert_same(model, twin)
