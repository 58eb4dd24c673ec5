"""Kinds of steps whose peak is predicted to the byte: live bytes measured on the CPU."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.runtime.live import LiveBytes
from tests.support.peaks import held_step
from tests.support.predicted import steady_peak_bytes


def measured_peak(model, x, y):
    """The peak of live bytes of the second step, everything counted."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes() as live:
            live.track(model, x, y)
            held_step(model, F.cross_entropy, x, y)
    return live


def predicted_and_measured(model, x, policy):
    """(plan, its predicted peak, the tracker of a step)."""
    y = torch.arange(len(x))
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    recorded = gistkit.capture(model, (x,), fake=False)
    found = {s.id: s.density for s in recorded.storages if s.density is not None}
    costs = cost_table(graph, hardware("cpu"), density=found)
    plan = plan_graph(graph, costs, policy=policy)
    model = copy.deepcopy(model) if policy == "plain" else gistkit.compress(copy.deepcopy(model), plan)
    return plan, steady_peak_bytes(graph, plan, costs), measured_peak(model, x, y)


class Rows(nn.Module):
    """Linears over the last of several dimensions, whose ReLUs may be in place; the mean of all rows."""

    def __init__(self, inplace, bias):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64, bias), nn.Linear(64, 64, bias)
        self.relu, self.head = nn.ReLU(inplace), nn.Linear(64, 10)

    def forward(self, x):
        x = self.relu(self.second(self.relu(self.first(x))))
        return self.head(x).flatten(1, -2).mean(1)


@pytest.mark.parametrize("policy", ["plain", "gist"])
@pytest.mark.parametrize(
    ("between", "inplace", "bias"),
    [((42,), True, True), ((7, 6), True, True), ((7, 6), True, False), ((7, 6), False, True)],
)
def test_linears_over_several_dimensions_with_a_relu_after_them(between, inplace, bias, policy):
    torch.manual_seed(0)
    _, predicted, live = predicted_and_measured(Rows(inplace, bias), torch.randn(8, *between, 32), policy)
    assert predicted == live.peak_bytes
