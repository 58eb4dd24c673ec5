"""Measured times of a step on their way into plans and profiles, in memory and through files."""

import json
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gistkit
from gistkit import StepTimes, capture
from gistkit.api import measuring
from gistkit.api.measuring import costs_of
from gistkit.ir import Plan
from gistkit.planning.cost import HOST_FIGURES, cost_table
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.simulate import simulate
from gistkit.profiling.host import HostTimes
from gistkit.profiling.measure import Work, _host_task_s
from tests.support.measuring_cases import step, targets
from tests.support.training import unchanged


@pytest.fixture(scope="module")
def times():
    return gistkit.measure(*step())


def test_a_plan_takes_its_seconds_from_the_measured_step(times):
    model, x = step()
    plan = gistkit.plan(model, x, policy="plain", measure=times)
    assert plan.step_s == pytest.approx(times.total_s, rel=1e-9)
    assert plan.prediction.measured == times.measured and times.measured.device == "cpu"
    assert gistkit.Plan.from_json(plan.to_json()) == plan
    assert gistkit.plan(model, x, policy="plain").prediction.measured is None
    now = gistkit.plan(model, x, policy="plain", measure=True)
    assert now.prediction.measured.fingerprint == times.fingerprint
    assert now.step_s != gistkit.plan(model, x, policy="plain").step_s


def test_measured_workspace_takes_the_place_of_the_predicted(times):
    """As from an H200: a CPU's convolutions have none."""
    model, x = step()
    graph = capture(model, (x,), backward=True)
    assert times.workspace_bytes == {}
    found = {t.index: 64 * 2**20 for t in graph.tasks if t.conv is not None}
    measured = replace(times, device="NVIDIA H200", workspace_bytes=found)
    assert StepTimes.from_json(measured.to_json()) == measured
    costs = costs_of(graph, PRESETS["h200"], measured)
    assert {t: costs.workspace_bytes(t) for t in found} == found
    plan = gistkit.plan(model, x, hardware="h200", measure=measured)
    assert plan.peak_bytes > 64 * 2**20 + PRESETS["h200"].libraries_bytes


def test_a_step_measured_unasked_that_cannot_be_is_planned_by_rates_and_the_log_says_so(monkeypatch, caplog):
    def other(*_, **__):
        raise gistkit.PlanMismatchError("the task 3", "a step without it", "measure this step")

    model, x = step()
    monkeypatch.setattr(measuring, "step_times", other)
    with pytest.raises(gistkit.PlanMismatchError, match="the task 3"):
        gistkit.plan(model, x, policy="plain", measure=True)
    monkeypatch.setattr(measuring, "on_cuda", lambda model, batch: True)
    assert gistkit.plan(model, x, policy="plain").prediction.measured is None
    assert "the step could not be measured" in caplog.text and "the task 3" in caplog.text


def test_measuring_changes_no_bit_of_anything():
    model, x = step()
    F.cross_entropy(model(x), targets()).backward()
    with unchanged(model):
        gistkit.plan(model, x, targets(), loss_fn=F.cross_entropy, policy="plain", measure=True)
    assert all(p.grad is not None for p in model.parameters()) and x.grad is None


def test_a_profile_with_measured_seconds(times):
    model, x = step()
    found = gistkit.profile(model, x, measure=times)
    predicted = gistkit.profile(model, x)
    assert found.step_s == pytest.approx(times.total_s, rel=1e-9)
    # Through a ratio: an ulp or two.
    assert found.layers[0].forward_s == pytest.approx(times.seconds[0], rel=1e-15) != predicted.layers[0].forward_s
    assert "measured on cpu: a step took" in " ".join(str(found).split())
    assert "measured" not in str(predicted) and predicted.times is None
    assert json.loads(found.to_json())["times"]["seconds"]["0"] == times.seconds[0]


@pytest.mark.parametrize("other", ["batch", "loss", "model", "sizes"])
def test_times_of_another_step(times, other):
    model, x = step(8) if other == "batch" else step()
    batch, loss_fn = (x,), None
    if other == "loss":
        batch, loss_fn = (x, targets()), F.cross_entropy
    elif other == "model":
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    elif other == "sizes":
        batch = (torch.randn(4, 3, 20, 20),)
    with pytest.raises(ValueError) as raised:
        gistkit.plan(model, *batch, loss_fn=loss_fn, measure=times)
    of = " of batch 4" if other == "batch" else ""
    assert re.fullmatch(
        rf"times: must be those of this step of batch {len(x)}, fingerprint \w+, got those of another step{of}, "
        rf"fingerprint {times.fingerprint}; measure anew: .*, with this model, batch and loss",
        str(raised.value),
    )


def test_nothing_that_could_run():
    model, x = step()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    with pytest.raises(ValueError) as raised:
        gistkit.plan(model, fake, measure=True)
    assert str(raised.value) == (
        "plan: measuring needs model and batch with real tensors on a CPU or CUDA device, got a fake tensor; pass real "
        "ones, a file of times that were measured elsewhere (measure=FILE), or measure=False"
    )
    with pytest.raises(ValueError, match=r"^measure: measuring needs .*, got one on device 'meta'; pass real ones"):
        gistkit.measure(model, x.to("meta"))
    with pytest.raises(ValueError, match=r"^profile: measuring needs .*, got one on device 'meta'; pass real ones"):
        gistkit.profile(model.to("meta"), x, measure=True, hardware="cpu")
    with pytest.raises(TypeError, match=r"^measure: model must be a torch.nn.Module, got function"):
        gistkit.measure(F.relu, x)
    with pytest.raises(ValueError, match=r"^measure: batch must hold the model's inputs, got no tensor"):
        gistkit.measure(step()[0])


def test_measured_workspace_of_a_sub_batch_and_beside_both_gradients():
    """A sub-batch of half the rows takes half; PyTorch's node has the input gradient when it takes the weight's."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    graph = gistkit.capture(model, (torch.randn(4, 3, 8, 8),), backward=True)
    weight = next(t.index for t in graph.tasks if t.part == "weight" and graph.tasks[t.index + 1].part == "input")
    gradient_bytes = 4 * 8 * 8 * 8 * 4
    peaks = {}
    for nbytes in (0, 10**6, 2 * 10**6):
        costs = cost_table(graph, replace(PRESETS["h200"], libraries_bytes=0), workspace_bytes={weight: nbytes})
        for policy, parts in (("plain", 1), ("gist", 1), ("gist", 2)):
            plan = Plan(policy, graph.fingerprint, (), (), sub_batches=parts)
            peaks[policy, parts, nbytes] = simulate(graph, plan, costs).peak_bytes
    for parts in (1, 2):
        assert peaks["gist", parts, 2 * 10**6] - peaks["gist", parts, 10**6] == 10**6 // parts
    weights_bytes = sum(p.numel() * 4 for p in model[1].parameters())
    beside = peaks["plain", 1, 10**6] - peaks["gist", 1, 10**6]
    assert gradient_bytes <= beside <= gradient_bytes + weights_bytes


def test_the_hosts_seconds_of_the_model_take_the_place_of_the_hardwares():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    graph = gistkit.capture(model, (x,), backward=True)
    assert _host_task_s(graph, PRESETS["cpu"], model, Work((x,), {})) == HostTimes()
    host = _host_task_s(graph, PRESETS["h200"], model, Work((x,), {}))
    assert 0 < host.host_s < 0.1 and 0 < host.runtime_host_s < 0.1 and host.move_host_factor >= 1
    assert host.form_host_factor >= 0
    assert "forward" not in vars(model) and all(p.grad is None for p in model.parameters())
    seconds = {t.index: 1e-3 for t in graph.tasks}
    times = StepTimes("a", "NVIDIA H200", 4, 4, 1.0, seconds, **host._asdict())
    found = costs_of(graph, PRESETS["h200"], times).hardware
    assert tuple(getattr(found, name) for name in HOST_FIGURES) == host
    assert costs_of(graph, PRESETS["cpu"], times).hardware is PRESETS["cpu"]
    assert StepTimes.from_json(times.to_json()) == times
