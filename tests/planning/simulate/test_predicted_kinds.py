"""Kinds of steps whose peak is predicted to the byte: live bytes measured on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from tests.support.peaks import held_step, peaks_of_steps
from tests.support.predicted import steady_peak_bytes


class Rows(nn.Module):
    """Linears over the last of several dimensions, whose ReLUs may be in place; the mean of all rows."""

    def __init__(self, inplace):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.relu, self.head = nn.ReLU(inplace), nn.Linear(64, 10)

    def forward(self, x):
        x = self.relu(self.second(self.relu(self.first(x))))
        return self.head(x).flatten(1, -2).mean(1)


@pytest.mark.parametrize("policy", ["plain", "gist"])
@pytest.mark.parametrize(("between", "inplace"), [((42,), True), ((7, 6), True), ((7, 6), False)])
def test_linears_over_several_dimensions_with_a_relu_after_them(between, inplace, policy):
    torch.manual_seed(0)
    model, x, y = Rows(inplace), torch.randn(8, *between, 32), torch.arange(8)
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(y,))
    recorded = gistkit.capture(model, (x,), fake=False)
    costs = cost_table(graph, hardware("cpu"), density={s.id: s.density for s in recorded.storages if s.density})
    plan = plan_graph(graph, costs, policy=policy)
    if policy == "gist":
        gistkit.compress(model, plan)
    peaks = peaks_of_steps(model, lambda: held_step(model, F.cross_entropy, x, y), x, y)
    assert steady_peak_bytes(graph, plan, costs) == peaks[1]
