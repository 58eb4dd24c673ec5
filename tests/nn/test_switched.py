"""Convolutions under cuDNN's switches: what a plan may choose of what was measured, and that the runtime does so."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gistkit
from gistkit import CallChoice, StepTimes, capture
from gistkit.nn.switched import switched
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.part_algorithms import DEFAULT, SWITCHES, by_part, is_switched
from gistkit.planning.cost.times import step_fingerprint

H200 = PRESETS["h200"]
MIB = 2**20


def now():
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())


def step():
    return network(), torch.randn(4, 3, 16, 16)


def made_up(graph, benchmark=(1.0, 0), deterministic=(1.0, 0), default=(1.0, 0)):
    """Times as from an H200: (share of 1 ms, workspace) of every convolution's task."""
    convs = [t.index for t in graph.tasks if t.conv is not None]
    each = {DEFAULT: default, "benchmark": benchmark, "deterministic": deterministic}
    return StepTimes(
        step_fingerprint(graph),
        "NVIDIA H200",
        graph.batch,
        graph.batch,
        0.1,
        {t.index: 1e-3 for t in graph.tasks},
        {name: {t: (1e-3 * share, nbytes) for t in convs} for name, (share, nbytes) in each.items()},
    )


def test_switches_are_put_back():
    before = now()
    for name, wanted in SWITCHES.items():
        with pytest.raises(KeyError), switched(name):
            assert now() == wanted
            raise KeyError
        assert now() == before
    with switched(""):
        assert now() == before


def test_a_plan_switches_what_is_faster():
    model, x = step()
    graph = capture(model, (x,), backward=True)
    times = made_up(graph, benchmark=(0.5, 0))
    fast = gistkit.plan(model, x, hardware="h200", measure=times, fidelity="reassociated")
    assert {c.algorithm for c in fast.choices if c.op == "conv2d"} == {"benchmark"}
    assert fast.fidelity == "reassociated"
    slow = gistkit.plan(model, x, hardware="h200", measure=times)
    assert not any(is_switched(c.algorithm) for c in slow.choices) and slow.fidelity == "bitwise"
    convs = sum(t.conv is not None for t in graph.tasks)
    assert slow.step_s - fast.step_s == pytest.approx(convs * 0.5e-3)
    # vDNN's performance-optimal convolutions are the same, and no less another order of sums.
    vdnn = gistkit.plan(model, x, hardware="h200", measure=times, fidelity="reassociated", policy="cdma")
    assert {c.algorithm for c in vdnn.choices if c.op == "conv2d"} == {"benchmark"}
    assert vdnn.fidelity == "reassociated"
    assert gistkit.plan(model, x, hardware="h200", measure=times, policy="cdma").fidelity == "bitwise"


def test_a_budget_may_ask_for_less_workspace():
    model, x = step()
    graph = capture(model, (x,), backward=True)
    times = made_up(graph, (1.0, 64 * MIB), deterministic=(1.5, 0), default=(1.0, 64 * MIB))
    free = gistkit.plan(model, x, hardware="h200", measure=times, fidelity="reassociated")
    assert not any(is_switched(c.algorithm) for c in free.choices)
    assert free.peak_bytes > 64 * MIB + H200.libraries_bytes
    tight = gistkit.plan(model, x, hardware="h200", measure=times, fidelity="reassociated", budget="110MiB")
    assert {c.algorithm for c in tight.choices if c.op == "conv2d"} == {"deterministic"}
    with pytest.raises(gistkit.BudgetError) as raised:
        gistkit.plan(model, x, hardware="h200", measure=times, budget="110MiB")
    assert raised.value.least_bytes["bitwise"] > 110 * MIB


class Seen(TorchDispatchMode):
    """The switches under which every convolution and gradient ran."""

    def __init__(self):
        super().__init__()
        self.forward, self.weight, self.input = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.forward.append(now())
        if func is torch.ops.aten.convolution_backward.default:
            self.weight += [now()] * args[-1][1]
            self.input += [now()] * args[-1][0]
        return func(*args, **(kwargs or {}))


def run(model, x):
    seen = Seen()
    with seen:
        loss = model(x).square().mean()
        between = now()
        loss.backward()
    return seen, between, [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("fidelity", ["bitwise", "reassociated"])
def test_the_runtime_runs_under_the_planned_switches(fidelity):
    model, x = step()
    _, _, plain = run(copy.deepcopy(model), x)
    times = made_up(capture(model, (x,), backward=True), benchmark=(0.5, 0))
    plan = gistkit.plan(model, x, hardware="h200", measure=times, fidelity=fidelity)
    before = now()
    wanted = SWITCHES["benchmark"] if fidelity == "reassociated" else before
    gistkit.compress(model, gistkit.Plan.from_json(plan.to_json()))
    model(x)  # the first one is captured, by fake convolutions
    seen, between, found = run(model, x)
    assert seen.forward == [wanted] * 2 and seen.weight == [wanted] * 2 and seen.input == [wanted]
    assert between == before == now()
    # A CPU has nothing to switch: the same bits.
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_a_segment_runs_anew_under_the_switches_of_its_forward():
    """With others its convolutions might give other bits than the forward did."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())))
    x = torch.randn(4, 8, 16, 16)
    plan = gistkit.plan(model, x, policy="checkpoint", hardware="cpu")
    assert any(d.codec == "recompute" for d in plan.decisions)
    told = by_part({"forward": "benchmark", "weight": "deterministic", "input": ""})
    choices = tuple(CallChoice(2 * n, "conv2d", algorithm=told) for n in range(6))
    gistkit.compress(model, replace(plan, choices=choices))
    model(x).sum().backward()
    seen, _, _ = run(model, x)
    assert len(seen.forward) > 6 and set(seen.forward) == {SWITCHES["benchmark"]}
    assert seen.weight == [SWITCHES["deterministic"]] * 6 and seen.input == [now()] * 5
