"""Algorithms as `optimal` chooses them: for each task of a convolution by itself, equal to brute force."""

from itertools import product

import pytest
import torch
from torch import nn

from gistkit.capture.entry import capture
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.part_algorithms import of_part
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.options import options
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.policies.optimal.plans import plan_of
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.variants import Allowed
from gistkit.planning.simulate.simulator import Simulator, simulate
from tests.planning.policies.test_optimal import NEAR, ROOM, restricted

PARTS = ("forward", "weight", "input")


@pytest.fixture(scope="module")
def problem():
    """Two convolutions on a K40m: (graph, costs, the first option of every storage)."""
    with torch.device("meta"):
        layers = [nn.Conv2d(16, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 48, 5, padding=2), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4))
        graph = capture(model, (torch.empty(32, 16, 28, 28),), backward=True)
    costs = cost_table(graph, hardware("k40m"))
    return graph, costs, {s: found[:1] for s, found in options(graph, costs).items()}


def test_every_task_chooses_for_itself(problem):
    graph, costs, first = problem
    simulator = Simulator(graph, costs)
    with restricted(first):
        made = Problem(graph, costs, simulator, Allowed(algorithms=True))
    groups = made.groups
    assert sum(len(g) > 1 for g in groups) == 5  # the first convolution has no input gradient
    runs = []
    for taken in product(*(range(len(g)) for g in groups)):
        run = simulator.run(plan_of(made, taken))
        runs.append((run.peak_bytes, run.step_s))
    peaks = sorted({p for p, _ in runs})
    assert len(peaks) > 3
    mixed = set()
    for budget in peaks[:: max(1, len(peaks) // 6)]:
        best = min(s for p, s in runs if p <= budget)
        with restricted(first):
            plan = optimal(graph, costs, budget, time_limit_s=20)
        assert simulate(graph, plan, costs).peak_bytes == plan.peak_bytes <= budget
        assert plan.step_s * (1 - plan.gap) <= best * (1 + ROOM) and best <= plan.step_s * (1 + 1e-9)
        assert plan.step_s <= best * NEAR
        mixed |= {tuple(of_part(c.algorithm, part) for part in PARTS) for c in plan.choices if c.algorithm}
    assert any(len(set(names)) > 1 for names in mixed)
