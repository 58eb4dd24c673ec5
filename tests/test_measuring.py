"""Measured times of a step on their way into plans and profiles: in memory, through files, from the command line."""

import copy
import json
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gistkit
from gistkit import MeasureError, StepTimes, capture, cli
from gistkit.graph.scale import scaled
from gistkit.plan.cost import cost_table
from gistkit.plan.hardware import PRESETS
from gistkit.plan.times import step_fingerprint
from gistkit.runtime import measure
from gistkit.runtime import times as runtime_times
from gistkit.runtime.measure import Measured, Work
from gistkit.runtime.times import does_not_fit, step_times

NET = "tests.test_measuring:network"
SMALL = [NET, "--batch", "4", "--image-size", "16"]
CPU = PRESETS["cpu"]


class Net(nn.Module):
    """Batch norm, dropout, and numbers drawn from Python and NumPy: everything that a step changes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x):
        random.random()
        np.random.rand()
        return self.head(self.drop(F.relu(self.norm(self.conv(x))).mean((2, 3))))


def network(image_size=16):
    return Net()


def step(batch=4):
    torch.manual_seed(0)
    return Net(), torch.randn(batch, 3, 16, 16)


def targets(batch=4):
    return torch.arange(batch) % 5


@pytest.fixture(scope="module")
def times():
    return gistkit.measure(*step())


def labelled(y):
    """The loss of the commands."""
    return F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))


def saved(tmp_path, found):
    file = tmp_path / "times.json"
    file.write_text(found.to_json())
    return file


def test_a_plan_takes_its_seconds_from_the_measured_step(times):
    model, x = step()
    plan = gistkit.plan(model, x, policy="plain", measure=times)
    assert plan.step_s == pytest.approx(times.total_s, rel=1e-9)
    assert plan.settings["measured"] == times.told and plan.settings["measured"]["device"] == "cpu"
    assert gistkit.Plan.from_json(plan.to_json()).settings == plan.settings
    assert gistkit.plan(model, x, policy="plain").settings["measured"] is None
    now = gistkit.plan(model, x, policy="plain", measure=True)
    assert now.settings["measured"]["fingerprint"] == times.fingerprint
    assert now.step_s != gistkit.plan(model, x, policy="plain").step_s


def test_a_file_between_them(times, tmp_path):
    model, x = step()
    file = saved(tmp_path, times)
    assert StepTimes.from_json(file.read_text()) == times
    plans = [gistkit.plan(model, x, policy="gist", measure=way) for way in (times, file, str(file))]
    assert plans[0] == plans[1] == plans[2]
    # Times that are there already are also for a model that has no memory.
    meta = gistkit.plan(model.to("meta"), x.to("meta"), policy="gist", measure=file, hardware="cpu")
    assert meta.step_s == plans[0].step_s


def test_what_was_measured(times):
    model, x = step()
    graph = capture(model, (x,), backward=True)
    assert sorted(times.seconds) == [t.index for t in graph.tasks]
    assert (times.device, times.batch, times.rows) == ("cpu", 4, 4) and times.step_s > 0
    assert times.fingerprint == step_fingerprint(graph)


def test_measuring_changes_no_bit_of_anything():
    model, x = step()
    F.cross_entropy(model(x), targets()).backward()
    twin, gradients = copy.deepcopy(model), [p.grad.clone() for p in model.parameters()]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    gistkit.plan(model, x, targets(), loss_fn=F.cross_entropy, policy="plain", measure=True)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[2], strict=True))
    for (name, now), then in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(now, then), name
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(p.grad is not None for p in model.parameters()) and x.grad is None


def test_named_inputs_and_a_compressed_part(monkeypatch):
    model, x = step()
    gistkit.compress(model.head)
    original, seen = measure._one_step, []
    monkeypatch.setattr(
        measure, "_one_step", lambda graph, twin, work: (seen.append(twin), original(graph, twin, work))[1]
    )
    found = gistkit.measure(model, {"x": x}, targets(), loss_fn=F.cross_entropy)
    assert seen and not any("forward" in vars(m) for twin in seen for m in twin.modules())
    assert "forward" in vars(model.head)
    model, x = step()
    assert found.fingerprint == gistkit.measure(model, x, targets(), loss_fn=F.cross_entropy).fingerprint


def test_a_profile_with_measured_seconds(times):
    model, x = step()
    found = gistkit.profile(model, x, measure=times)
    predicted = gistkit.profile(model, x)
    # Through a ratio: an ulp or two.
    measured_s = [times.seconds[i] for i in range(len(found.tasks))]
    assert [t.seconds for t in found.tasks] == pytest.approx(measured_s, rel=1e-15)
    assert [t.predicted_s for t in found.tasks] == [t.seconds for t in predicted.tasks]
    assert found.step_s == pytest.approx(times.total_s, rel=1e-9)
    assert found.layers[0].forward_s == found.tasks[0].seconds != predicted.layers[0].forward_s
    text = str(found)
    assert "ms by op, measured and predicted" in text and "measured on cpu: a step took" in text
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


@pytest.mark.parametrize("call", [gistkit.plan, gistkit.profile])
def test_hardware_that_is_not_here(times, call):
    for way, hardware in ((True, "titanx"), (times, "h200"), (times, "k40m")):
        with pytest.raises(ValueError) as raised:
            call(*step(), measure=way, hardware=hardware)
        assert str(raised.value) == (
            f"{call.__name__ if call is gistkit.profile else 'plan'}: measured times must be of the hardware that is "
            f"planned for, {hardware!r}, got times of 'cpu'; leave hardware out, name a file of `gistkit calibrate` on "
            "that device, or do not measure"
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


def changed(text, **values):
    return json.dumps({**json.loads(text), **values})


NONSENSE = {
    "not json": (lambda t: "{", r"not JSON \("),
    "a list": (lambda t: "[1]", r'must be a JSON object with "format": \'gistkit.times\''),
    "a plan": (lambda t: '{"format": "gistkit.plan"}', r'must be a JSON object with "format": \'gistkit.times\''),
    "version": (lambda t: changed(t, version=7), r"version must be 1, got 7"),
    "unknown": (lambda t: changed(t, speed=1), r"unknown 'speed'"),
    "missing": (lambda t: json.dumps({k: v for k, v in json.loads(t).items() if k != "rows"}), r"no 'rows'"),
    "device": (lambda t: changed(t, device=3), r"device must be a text that is not empty, got 3"),
    "batch": (lambda t: changed(t, batch=True), r"batch must be a whole number of at least 0, got True"),
    "rows": (lambda t: changed(t, rows=5), r"rows must be at most the batch's 4, got 5"),
    "step": (lambda t: changed(t, step_s=0), r"step_s must be seconds above 0, got 0"),
    "nan": (lambda t: changed(t, seconds={"0": float("nan")}), r"seconds must be seconds above 0 .*, got \{0: nan\}"),
    "text": (lambda t: changed(t, seconds={"0": "1"}), r"seconds must be seconds above 0 .*, got \{0: '1'\}"),
    "key": (lambda t: changed(t, seconds={"conv": 1.0}), r"seconds must be an object by number of a task"),
    "switches": (
        lambda t: changed(t, convolutions={"fast": {}}),
        r"convolutions must be by default, benchmark, .*'fast'",
    ),
    "pair": (
        lambda t: changed(t, convolutions={"default": {"0": [1.0]}}),
        r"convolutions must be \[seconds, bytes\] by",
    ),
    "bytes": (
        lambda t: changed(t, convolutions={"default": {"0": [1.0, -1]}}),
        r"convolutions must be \[seconds above 0, whole bytes\] by number of a task, got \{0: \[1.0, -1\]\}",
    ),
    "no object": (
        lambda t: changed(t, convolutions=[]),
        r"convolutions must be an object by switches of cuDNN, got \[\]",
    ),
    "array": (lambda t: changed(t, seconds=[1.0]), r"seconds must be an object by number of a task"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_files(times, tmp_path, case):
    make, text = NONSENSE[case]
    file = saved(tmp_path, times)
    file.write_text(make(times.to_json()))
    with pytest.raises(ValueError, match=rf"^plan: the file of times {file}: {text}.*; measure anew: `gistkit profile"):
        gistkit.plan(*step(), measure=file)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"^plan: the file of times nowhere.json cannot be read .*; measure anew"):
        gistkit.plan(*step(), measure="nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"^profile: the file of times .*binary cannot be read"):
        gistkit.profile(*step(), measure=tmp_path / "binary")
    with pytest.raises(TypeError) as raised:
        gistkit.plan(*step(), measure=3)
    assert str(raised.value) == (
        "plan: measure must be True, False, the path of a file of times or what gistkit.measure returned, got int; "
        "pass one of these"
    )


def limited(monkeypatch, most_rows, error):
    """A device on which more rows do not fit; every task takes 1 s, a step 9 s."""
    tried = []

    def measured(graph, model, work, *, repeats):
        tried.append(len(work.args[0]))
        assert all(len(t) == tried[-1] for t in work.targets)
        if tried[-1] > most_rows:
            raise error
        return Measured(dict.fromkeys(range(len(graph.tasks)), 1.0), {}, 9.0)

    monkeypatch.setattr(runtime_times, "measured_step", measured)
    return tried


OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("FIND was unable to find an engine to execute this computation"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", OUT, ids=str)
def test_a_step_that_does_not_fit_is_measured_on_fewer_rows(monkeypatch, error):
    model, x = step(16)
    tried = limited(monkeypatch, 5, error)
    found = gistkit.measure(model, x, targets(16), loss_fn=F.cross_entropy)
    assert tried == [16, 8, 4] and (found.batch, found.rows, found.step_s) == (16, 4, 9.0)
    graph = capture(model, (x,), backward=True, loss_fn=F.cross_entropy, targets=(targets(16),))
    whole, part = cost_table(graph, CPU), cost_table(scaled(graph, 4), CPU)
    conv = next(t.index for t in graph.tasks if t.op == "conv2d")
    assert found.seconds[conv] == pytest.approx(whole.task_s(conv) / part.task_s(conv))
    assert 3.5 < found.seconds[conv] <= 4 and all(1 <= s <= 4 for s in found.seconds.values())
    plan = gistkit.plan(model, x, targets(16), loss_fn=F.cross_entropy, policy="plain", measure=found)
    assert plan.settings["measured"]["rows"] == 4
    text = str(gistkit.profile(model, x, targets(16), loss_fn=F.cross_entropy, measure=found))
    assert "a step of 4 rows, scaled to 16 took 9,000 ms, all tasks of the batch add up to" in " ".join(text.split())


def test_not_even_one_row(monkeypatch):
    tried = limited(monkeypatch, 0, OUT[0])
    with pytest.raises(MeasureError) as raised:
        gistkit.measure(*step(6))
    assert tried == [6, 3, 2, 1] and raised.value.__cause__ is OUT[0]
    assert str(raised.value) == (
        "measure: a plain step must fit cpu with one row of the batch at least, and does not (OutOfMemoryError: CUDA "
        "out of memory. Tried to allocate 2.00 GiB.); free some of its memory, measure on a larger device and pass the "
        "file, or plan without measured times"
    )


def test_other_errors_of_the_step_are_its_own(monkeypatch):
    limited(monkeypatch, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
        gistkit.measure(*step())
    assert not does_not_fit(ValueError("out of memory")) and not does_not_fit(RuntimeError("an engine"))


class Whole(nn.Module):
    """Works with all eight rows only."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x).reshape(8, 3)


def test_a_batch_that_cannot_be_cut(monkeypatch):
    original = runtime_times.measured_step

    def measured(graph, model, work, *, repeats):
        if len(work.args[0]) == 8:
            raise OUT[0]
        return original(graph, model, work, repeats=repeats)

    monkeypatch.setattr(runtime_times, "measured_step", measured)
    with pytest.raises(MeasureError) as raised:
        gistkit.measure(Whole(), torch.randn(8, 3))
    assert re.fullmatch(
        r"measure: a plain step on all 8 rows does not fit, and on the first 4 of them it fails \(RuntimeError: shape "
        r".*\); measure with a batch that fits, or plan without measured times",
        str(raised.value),
    )


def test_a_host_is_not_tried_beyond_its_memory(monkeypatch):
    """A host would swap, or end the process."""
    model, x = step(16)
    graph = capture(model, (x,), backward=True)
    peak_bytes = gistkit.plan(model, x, policy="plain").peak_bytes
    tried = limited(monkeypatch, 16, OUT[0])
    for available_bytes, rows in ((peak_bytes, 16), (peak_bytes - 1, 8), (0, 16), (1, 1)):
        monkeypatch.setattr(runtime_times, "_available_bytes", lambda n=available_bytes: n)
        assert step_times(graph, CPU, model, Work((x,), {})).rows == rows == tried[-1]


def test_the_hosts_memory(tmp_path, monkeypatch):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       100 kB\nMemAvailable:   64 kB\n")
    monkeypatch.setattr(runtime_times, "MEMORY_FILE", file)
    assert runtime_times._available_bytes() == 65536
    monkeypatch.setattr(runtime_times, "MEMORY_FILE", tmp_path / "none")
    assert runtime_times._available_bytes() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on the GPU there")
def test_commands(tmp_path, capsys):
    times, numbers = tmp_path / "new" / "times.json", tmp_path / "numbers.json"
    arguments = [*SMALL, "--measure", "--times", str(times), "--json", str(numbers)]
    assert cli.main(["profile", *arguments]) == 0
    out = capsys.readouterr().out
    assert "ms by op, measured and predicted" in out and "measured on cpu: a step took" in out
    found = StepTimes.from_json(times.read_text())
    raw = json.loads(numbers.read_text())
    assert raw["times"]["seconds"] == {str(t): s for t, s in found.seconds.items()}
    assert raw["tasks"][0]["seconds"] == pytest.approx(found.seconds[0]) != raw["tasks"][0]["predicted_s"]
    words = ["--times", str(times), "--policy", "gist", "--json", str(numbers)]
    assert cli.main(["plan", *SMALL, *words]) == 0
    assert "seconds measured on cpu: a step took" in " ".join(capsys.readouterr().out.split())
    raw = json.loads(numbers.read_text())
    assert raw["times"]["fingerprint"] == found.fingerprint == raw["plan"]["settings"]["measured"]["fingerprint"]
    assert raw["policies"][0]["step_s"] == pytest.approx(found.total_s, rel=1e-9)
    assert cli.main(["plan", *SMALL, "--measure", "--policy", "gist", "--json", str(numbers)]) == 0
    assert json.loads(numbers.read_text())["times"]["device"] == "cpu"


@pytest.mark.parametrize("command", ["plan", "profile"])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--measure", "--hardware", "k40m"],
            "measured times must be of the hardware that is planned for, 'k40m', got",
        ),
        (
            ["--times", "nowhere.json"],
            "the file of times nowhere.json cannot be read .*; measure anew: `gistkit profile",
        ),
        (
            ["--times", "FILE", "--hardware", "h200"],
            "measured times must be of the hardware that is planned for, 'h200'",
        ),
        (
            ["--times", "FILE", "--batch", "5", "--hardware", "cpu"],
            "must be those of this step of batch 5, fingerprint",
        ),
        (["--measure", "--times", "/proc/none/x.json"], "No such file or directory|Permission"),
    ],
)
def test_wrong_input_of_the_commands(times, tmp_path, capsys, command, arguments, text):
    graph = capture(Net(), (torch.empty(4, 3, 16, 16),), backward=True, loss_fn=labelled)
    every = {t.index: 1e-3 for t in graph.tasks}
    file = saved(tmp_path, StepTimes(step_fingerprint(graph), "cpu", 4, 4, 1.0, every))
    assert cli.main([command, *SMALL, *(str(file) if a == "FILE" else a for a in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("gistkit: error: ")
    assert re.search(text, shown.err), shown.err
