"""Calibration on the CPU: figures within reason, the file as a hardware, the command."""

import json

import pytest
import torch

from gistkit import capture, cli, compress
from gistkit.planning.cost.devices import Hardware
from gistkit.profiling import host
from gistkit.profiling.calibration import calibrate

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured():
    return calibrate("cpu")


def test_a_cpu_has_no_link_and_knows_its_counts(measured):
    assert (measured.d2h_gbps, measured.h2d_gbps, measured.both_gbps) == (0.0, 0.0, 0.0)
    assert not measured.has_link and not measured.async_counts
    assert sorted(measured.flops) == ["bfloat16", "float16", "float32"]


def test_figures_are_possible_ones(measured):
    # Orders of magnitude that hold on any machine that runs these tests, alone or crowded.
    assert 2**28 < measured.memory_bytes < 2**46
    assert 0.01 < measured.memory_gbps < 5000
    assert all(1e6 < rate < 1e15 for rate in measured.flops.values())
    assert 1e-8 < measured.launch_s < 1e-2
    assert 0.01 < measured.codec_slowdown < 10_000
    assert measured.host_s == measured.runtime_host_s == measured.link_interference == 0.0  # a CPU is its own host


def test_the_host_is_timed_by_whole_steps(monkeypatch):
    monkeypatch.setattr(host, "BLOCKS", 2)
    calls, compressed = [], []
    monkeypatch.setattr(host, "compress", lambda model, plan: compressed.append(plan) or compress(model, plan))

    def timed(step, device):
        assert len(compressed) == len(calls)  # plain first, then a plan of no decision, of reruns, of forms
        assert all(bool(plan.decisions) == (number > 0) for number, plan in enumerate(compressed))
        step()
        calls.append(0.11 * (len(calls) + 1))
        return [host.Timing(calls[-1], 1.0)]

    monkeypatch.setattr(host, "timings", timed)
    plain_s, runtime_s, rerun, form = host.host_task_s(CPU)
    model, x = host.small_step(CPU)
    tasks = len(capture(model, (x,), backward=True).tasks)
    assert 12 <= tasks <= 20  # 6 forward; as many nodes backward, the convolutions' with two parts; the output's sum
    assert plain_s == pytest.approx(0.11 / tasks, rel=1e-3)
    assert runtime_s == pytest.approx(0.22 / tasks, rel=1e-3)
    assert 0.11 / tasks / runtime_s < rerun < 0.11 / runtime_s  # what is longer is for less than a step's tasks
    forms = sum(d.codec not in ("", "dense") for d in compressed[2].decisions)
    assert form == pytest.approx(0.22 / forms / runtime_s, rel=1e-3)
    assert len(calls) == 4


def test_timings_of_a_core_that_others_slow_down_count_as_at_its_quickest():
    quiet, slow = [(1.0, 0.01), (2.0, 0.02), (9.0, 0.01)], [(6.0, 0.03)]
    found = host.at_one_pace([[host.Timing(*t) for t in several] for several in (quiet, slow)])
    assert found == pytest.approx([1.0, 2.0])  # the median, of what most steps take
    steps = []
    assert len(host.timings(lambda: steps.append(1), CPU)) == host.REPEATS
    assert len(steps) == host.STEPS * (host.REPEATS + 1)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("meta", "calibrate: device must be cpu, cuda or cuda:N, got 'meta'; name one of these"),
        (None, "calibrate: device must be cpu, cuda or cuda:N, got None; name one of these"),
        (
            "cuda:4096",
            f"calibrate: device must be there, got 'cuda:4096', but torch sees {torch.cuda.device_count()} CUDA "
            "devices; use 'cpu' or one of these",
        ),
    ],
)
def test_refusals(device, text):
    with pytest.raises(ValueError) as raised:
        calibrate(device)
    assert str(raised.value) == text


def test_the_command(measured, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gistkit.commands.calibrate.calibrate", lambda device: measured)
    path = tmp_path / "new" / "here.json"
    assert cli.main(["calibrate", "--device", "cpu", "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    for text in (measured.name, "memory GiB", "copy GB/s", "float32 TFLOP/s", "launch us"):
        assert text in shown
    assert "host" not in shown
    assert Hardware.from_json(path.read_text()) == measured
    assert json.loads(path.read_text())["name"] == measured.name
