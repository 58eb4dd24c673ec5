"""The peak of a plan with transfers, measured on the CPU, where a copy on the host is memory that LiveBytes does not
see."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch

import gistkit
from gistkit.api import planning
from gistkit.planning.cost.table import cost_table
from gistkit.planning.simulate.simulator import simulate
from tests.support.models import DenseNet, UNet
from tests.support.peaks import held_step, peaks_of_steps
from tests.support.plan_cases import LINKED, Small, data, loss_of, made, ways

NETS = {"dense": (DenseNet, 32), "unet": (UNet, 32), "small": (Small, 16)}
SLOW = replace(LINKED, d2h_gbps=1.0, h2d_gbps=1.0, both_gbps=2.0)
"""A link over which vDNN's transfers take several tasks each."""


@cache
def case(name):
    """(model, x, y, graph, costs): the densities are those of a recorded step."""
    torch.manual_seed(0)
    make, size = NETS[name]
    model, (x, y) = make().train(), data(size)
    graph = gistkit.capture(model, (x,), backward=True, loss_fn=loss_of, targets=(y,))
    recorded = gistkit.capture(model, (x,), fake=False)
    found = {s.id: s.density for s in recorded.storages if s.density is not None}
    return model, x, y, graph, cost_table(graph, SLOW, density=found)


def measured(model, plan, x, y):
    """Peaks of live bytes of two steps under the plan, everything counted."""
    twin = gistkit.compress(copy.deepcopy(model), plan)

    def step():
        torch.manual_seed(1)
        held_step(twin, loss_of, x, y)

    return peaks_of_steps(twin, step, x, y)


@pytest.mark.parametrize(("policy", "budget"), [("cdma", None), ("modnn", "75%")])
def test_the_peak_is_kept(policy, budget):
    model, x, y, graph, costs = case("dense")
    plan = planning.plan_graph(graph, costs, policy=policy, budget=budget, refuse=False)
    peaks = measured(model, plan, x, y)
    assert any(d.place == "host" for d in plan.decisions)
    assert max(peaks) <= plan.peak_bytes
    assert peaks[1] > 0.95 * plan.peak_bytes


@pytest.mark.parametrize(("name", "number"), [("unet", 1), ("small", 2)])
def test_payloads_masks_and_maps_on_the_host_too(name, number):
    model, x, y, graph, costs = case(name)
    decisions = []
    for d in ways(graph, costs, number, "host", "fp8"):
        if name == "small" and "zvc" in d.codec:
            continue  # behind a dropout, whose zeros are not those of the step that was recorded
        decisions.append(replace(d, prefetch=d.release) if d.place == "host" else d)  # as early as can be
    plan = made(graph, decisions)
    assert measured(model, plan, x, y)[1] <= simulate(graph, plan, costs).peak_bytes
