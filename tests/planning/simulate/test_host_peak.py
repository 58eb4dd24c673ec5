"""Peaks measured on the CPU: of plans with transfers, and of what is decoded for a segment that runs anew."""

import copy
import gc
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import gistkit
from gistkit.api import planning
from gistkit.capture.entry import capture
from gistkit.ir.plan import Decision
from gistkit.ir.tasks import BACKWARD
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.predicted import make_plan
from gistkit.planning.simulate.context import Context, StepIndex
from gistkit.planning.simulate.simulator import Simulator, memory_bytes, simulate
from gistkit.runtime.live import LiveBytes
from tests.support.graphs import Apply
from tests.support.models import DenseNet, UNet
from tests.support.peaks import densities_of, held_step, peaks_of_steps
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
    return model, x, y, graph, cost_table(graph, SLOW, density=densities_of(model, x))


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


def wide(channels, again):
    """Of three maps the last two come back from the first; ``again``: what starts them reads it once more."""

    def forward(m, x):
        source = torch.relu(m[0](x))
        y = m[2](torch.sigmoid(m[1](source))).sigmoid()
        return m[3](y * source[:, :16] if again else y).square().mean()

    sizes = (3, channels), (channels, 8), (8, 16), (16, 3)
    return Apply(forward, *(nn.Conv2d(*size, 1) for size in sizes))


def planned(again, kept, channels=16):
    """(model, input, graph, costs, plan): the maps between run anew from a source that is ``kept`` in some form."""
    torch.manual_seed(0)
    model, x = wide(channels, again), torch.randn(4, 3, 16, 16)
    graph = capture(model, (x,), backward=True)
    costs = cost_table(graph, hardware("cpu"), density=densities_of(model, x))
    of = {op: [graph.values[c.results[0]].storage for c in graph.calls if c.op == op] for op in ("relu", "sigmoid")}
    (source,) = of["relu"]
    decisions = [Decision(source, kept, mask=kept == "fp8")]
    decisions += [Decision(s, "recompute", "nowhere", sources=(source,)) for s in of["sigmoid"]]
    plan = make_plan("optimal", graph, costs, 2**30, decisions, fidelity="lossy" if kept == "fp8" else "bitwise")
    return model, x, graph, costs, plan


@pytest.mark.parametrize(("channels", "again", "kept"), [(16, True, "dense"), (64, False, "zvc"), (64, False, "fp8")])
def test_a_backward_holds_what_the_rerun_or_its_task_does(channels, again, kept):
    """The source is as large as a gradient, so that the task needs more than the rerun, or four times that."""
    model, x, graph, costs, plan = planned(again, kept, channels)
    context = Context.of(plan, StepIndex(graph))
    assert bool(context.decoded_for_segment) == (kept != "dense" and not again)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for _ in range(2):
        twin.zero_grad(set_to_none=True)
        gc.collect()
        with LiveBytes() as live:
            live.track(twin, x)
            twin(x).backward()
        assert live.peak_bytes <= plan.peak_bytes
    composed = Simulator(graph, costs).profile(plan)
    found = memory_bytes([i for i in composed.intervals if i.what != "scratch"], composed.tasks)
    wanted = max(n for n, task in zip(found, graph.tasks, strict=True) if task.phase == BACKWARD)
    assert max(e.nbytes for e in live.timeline if e.backward) == wanted
