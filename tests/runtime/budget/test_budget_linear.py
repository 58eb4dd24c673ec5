"""A budget for linears that are used several times: their weight's gradients are summed as they come."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.peaks import held_step, least_bytes, peaks_of_steps


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


@pytest.mark.parametrize("fidelity", ["bitwise", "reassociated"])
@pytest.mark.parametrize(("width", "times"), [(16, 2), (58, 3), (128, 5)])
def test_one_that_is_used_several_times_keeps_a_budget(width, times, fidelity):
    """Its weight's gradients are summed when the node that made them has let go of its bias's."""
    model, x, y = Repeated(width, times), torch.randn(64, width), torch.arange(64) % 3
    asked = {"loss_fn": F.cross_entropy, "fidelity": fidelity, "density": 1.0}
    lowest = least_bytes(model, x, y, **asked)
    held_step(model, F.cross_entropy, x, y)
    for budget in (lowest, int(1.03 * lowest), int(1.1 * lowest)):
        plan = gistkit.plan(model, x, y, budget=budget, **asked)
        twin = gistkit.compress(copy.deepcopy(model), plan)
        in_parts = plan.sub_batches > 1
        step = gistkit.step if in_parts else held_step
        peaks = peaks_of_steps(twin, lambda t=twin, s=step: s(t, F.cross_entropy, x, y), x, y)
        assert max(peaks) <= plan.peak_bytes <= budget
        if not in_parts:
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
