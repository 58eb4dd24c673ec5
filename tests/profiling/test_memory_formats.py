"""What channels_last would save of convolutions' workspace: the geometry of the trials, what is said of the bytes."""

import re
from dataclasses import replace

import pytest
import torch

import gistkit
from gistkit import BudgetError, capture, cli, zoo
from gistkit.planning.cost import StepTimes
from gistkit.profiling import memory_formats
from gistkit.profiling.memory_formats import channels_last_bytes
from tests.support.models import convolutions, inceptions

CPU = torch.device("cpu")


@pytest.fixture
def allocator(monkeypatch):
    """A card's figures: 10 MiB more at the most than afterwards."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30 * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * 2**20)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


@pytest.mark.parametrize(("make", "size"), [(inceptions, 32), (zoo.alexnet, 224)])
def test_every_convolution_is_tried_in_its_own_geometry(make, size, allocator):
    model, x = make(), torch.randn(4, 3, size, size)
    graph = capture(model, (x,), backward=True)
    convs = [t.index for t in graph.tasks if t.conv is not None]
    taken = dict.fromkeys(convs, 100 * 2**20)
    assert channels_last_bytes(graph, taken, 4, CPU) == dict.fromkeys(convs, 10 * 2**20)
    assert channels_last_bytes(graph, taken, 1, CPU) == dict.fromkeys(convs, 40 * 2**20)  # measured on a row of four


def test_little_workspace_and_what_does_not_fit_are_left_out(allocator, monkeypatch):
    model, x = convolutions(), torch.randn(4, 3, 32, 32)
    graph = capture(model, (x,), backward=True)
    convs = [t.index for t in graph.tasks if t.conv is not None]
    assert channels_last_bytes(graph, dict.fromkeys(convs, memory_formats.WORTH_BYTES - 1), 4, CPU) == {}

    def refuses(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(memory_formats, "_workspace", refuses)
    assert channels_last_bytes(graph, dict.fromkeys(convs, 2**30), 4, CPU) == {}


def test_a_plan_and_a_refusal_say_what_the_format_costs():
    model, x = convolutions(), torch.randn(4, 3, 32, 32)
    times = gistkit.measure(model, x)
    graph = capture(model, (x,), backward=True)
    first, second, *rest = (t.index for t in graph.tasks if t.conv is not None)
    workspace = {first: 6 * 2**30, second: 2**29, **dict.fromkeys(rest, 0)}
    times = replace(times, workspace_bytes=workspace, channels_last_bytes={first: 0})
    words = "convolutions take up to 6,144 MiB of workspace, in channels_last 512 MiB"
    assert times.workspace_remedy.startswith(words)
    assert StepTimes.from_json(times.to_json()) == times
    assert gistkit.plan(model, x, policy="plain", measure=times).details["workspace"].startswith(words)
    with pytest.raises(BudgetError, match=re.escape(words)):
        gistkit.plan(model, x, budget="1GiB", measure=times)
    without = replace(times, channels_last_bytes={})
    assert without.workspace_remedy == ""
    assert "workspace" not in gistkit.plan(model, x, policy="plain", measure=without).details


def test_the_command_says_what_the_format_costs(tmp_path, capsys):
    file = tmp_path / "times.json"
    words = ["tests.commands.test_cli_plan:small", "--batch", "4", "--image-size", "32", "--hardware", "cpu"]
    words += ["--times", str(file)]
    assert cli.main(["profile", *words, "--measure"]) == 0
    times = StepTimes.from_json(file.read_text())
    workspace = {**dict.fromkeys(times.seconds, 0), min(times.seconds): 6 * 2**30}
    file.write_text(
        replace(times, workspace_bytes=workspace, channels_last_bytes=dict.fromkeys(workspace, 0)).to_json()
    )
    assert "channels_last" not in capsys.readouterr().out
    assert cli.main(["plan", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "convolutions take up to 6,144 MiB of workspace, in channels_last 0 MiB" in shown
