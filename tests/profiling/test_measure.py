"""Seconds by task of a real step on the CPU."""

import time

import pytest
import torch
from torch import nn

from gistkit import capture
from gistkit.errors import PlanMismatchError
from gistkit.profiling import measure
from gistkit.profiling.measure import Work, measured_step


class Net(nn.Module):
    """A convolution, batch norm, a ReLU in place, a sum, a pool, dropout, a linear layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.relu, self.pool = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.square, self.drop = nn.Linear(128, 128), nn.Dropout(0.5)

    def forward(self, x):
        y = self.relu(self.norm(self.stem(x)))
        y = self.pool(self.relu(self.conv(y) + y)).flatten(1)
        return self.square(self.drop(self.square(y)))


def step(batch=4):
    torch.manual_seed(0)
    return Net(), torch.randn(batch, 3, 8, 8)


def measured_tasks(graph, model, x, repeats=1):
    return measured_step(graph, model, Work((x,), {}, (), None), repeats=repeats).seconds


@pytest.fixture
def ticking(monkeypatch):
    """A clock that goes on by one second at each look: an operator takes one second, whatever it does."""
    now = iter(range(1 << 30))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(next(now)))


def test_every_task_has_its_time_and_all_fit_into_the_step():
    model, x = step(batch=64)
    graph = capture(model, (x,), backward=True)
    start = time.perf_counter()
    taken = measured_tasks(graph, model, x, repeats=2)
    wall_s = time.perf_counter() - start
    assert sorted(taken) == [t.index for t in graph.tasks]
    assert min(taken.values()) > 0
    # Four steps ran, two of them watched, and the least of a task's times is at most that of either.
    assert sum(taken.values()) < wall_s / 2


def test_an_operator_goes_to_the_task_that_ran_it(ticking):
    model, x = step()
    graph = capture(model, (x,), backward=True)
    taken = measured_tasks(graph, model, x)
    by_op = {(t.op, t.phase, t.part): taken[t.index] for t in graph.tasks}
    # One operator each, and one for each gradient of a convolution; the sum of both gradients that meet before the
    # second one is shared by its two tasks. The stem has a weight gradient only.
    assert all(t.conv is not None for t in graph.tasks if t.op == "conv2d")
    assert by_op["conv2d", "forward", ""] == by_op["batch_norm", "backward", ""] == 1.0
    assert [taken[t.index] for t in graph.tasks if t.op == "conv2d" and t.part] == [1.5, 1.5, 1.0]
    # Dropout on the CPU: an empty tensor, its noise, the division and the product.
    assert by_op["dropout", "forward", ""] == 4.0
    assert sum(taken.values()) == int(sum(taken.values()))


def test_another_models_graph():
    model, x = step()
    graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid()), (x,), backward=True)
    with pytest.raises(PlanMismatchError) as raised:
        measured_tasks(graph, model, x)
    assert str(raised.value) == (
        "the step differs from its plan: expected the task 1, forward sigmoid of 1, got a step without it; "
        "measure the model, batch and loss that the graph was captured from"
    )
