"""``gistkit profile`` and ``gistkit plan`` as a user meets them: tables, files, pictures, exit status."""

import json
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

import gistkit
from gistkit import capture, cli
from gistkit.commands.images import _loss
from gistkit.ir.plan import Plan
from gistkit.planning.cost import Algorithm, StepTimes
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.policies.registry import POLICIES
from gistkit.report.plots import CLASS_COLOURS

NET = "tests.commands.test_cli_plan:small"
SMALL = [NET, "--batch", "4", "--image-size", "32", "--hardware", "titanx"]


def small(image_size=32):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(image_size**2 * 4, 10),
    )  # fmt: skip


def normed():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))


def made():
    convs = (nn.utils.parametrizations.weight_norm(nn.Conv2d(n, 64, 3, padding=1)) for n in (3, 64, 64))
    return nn.Sequential(*(m for conv in convs for m in (conv, nn.ReLU())), nn.Flatten(), nn.Linear(64 * 8**2, 10))


def test_profile(tmp_path, capsys):
    picture, numbers = tmp_path / "new" / "memory.png", tmp_path / "new" / "profile.json"
    assert cli.main(["profile", *SMALL, "--plot", str(picture), "--json", str(numbers)]) == 0
    shown = capsys.readouterr()
    texts = ("stashed feature maps", "ReLU -> pool", "gradient maps", "workspace", "reuse", f"{NET}, batch 4, titanx")
    assert all(text in shown.out for text in texts)
    raw = json.loads(numbers.read_text())
    assert raw["batch"] == 4 and raw["stashed_bytes"]["relu_pool"] == 4 * 16 * 32 * 32 * 4
    colours = [bytes.fromhex(CLASS_COLOURS[name][1:]) for name in ("weights", "stashed", "gradient_maps")]
    with Image.open(picture) as image:
        assert image.size == (1350, 840)
        assert set(map(tuple, colours)) <= {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}


def test_plan(tmp_path, capsys):
    numbers = tmp_path / "new" / "plan.json"
    assert cli.main(["plan", *SMALL, "--budget", "90%", "--json", str(numbers)]) == 0
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in POLICIES)
    assert all(title in shown for title in ("what becomes of the tensors", "kept MiB", "optimal on titanx: peak"))
    raw = json.loads(numbers.read_text())
    assert [row["policy"] for row in raw["policies"]] == list(POLICIES)
    plan = Plan.from_json(json.dumps(raw["plan"]))
    assert plan.policy == "optimal" and plan.peak_bytes <= raw["budget_bytes"] == plan.budget_bytes
    plain = raw["policies"][0]
    assert not plain["fits"] and raw["budget_bytes"] == int(0.9 * plain["peak_bytes"])


def test_tables_fit_eighty_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    on_cpu = ["--batch", "4096", "--hardware", "cpu", "--policy", "gist", "--image-size", "64"]
    assert cli.main(["plan", NET, *on_cpu]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and " why" not in out and max(map(len, out.splitlines())) <= 80
    assert "needs a link" in out
    assert cli.main(["profile", "vgg16", "--batch", "256", "--hardware", "titanx"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "140")
    numbers = tmp_path / "plan.json"
    assert cli.main(["plan", *SMALL, "--policy", "gist", "--lossy", "fp8", "--json", str(numbers)]) == 0
    assert " why" in capsys.readouterr().out
    plan = json.loads(numbers.read_text())["plan"]
    assert plan["fidelity"] == "lossy" and plan["contract"]["lossy"] == "fp8"


def test_a_policy_that_does_not_fit_says_what_its_class_needs(capsys):
    """Not the least of all classes, which sub-batches would be."""
    budget = ["--budget", "100kB"]
    assert cli.main(["plan", *SMALL, "--policy", "modnn", *budget]) == 1
    assert cli.main(["plan", *SMALL, "--policy", "modnn", "--fidelity", "reassociated", *budget]) == 1
    needs = re.findall(r"modnn +│ +needs ([0-9.]+)", capsys.readouterr().out)
    assert len(needs) == 2 and float(needs[0]) > float(needs[1])


def test_a_budget_that_is_not_met(capsys):
    assert cli.main(["plan", *SMALL, "--budget", "10kB"]) == 1
    shown = capsys.readouterr()
    assert "needs" in shown.out
    assert shown.err.splitlines()[-1].startswith(
        "gistkit: no plan by policy 'optimal': the budget must be at least what the step needs, by the class of moves: "
    )
    assert "no class of moves would do; raise the budget to" in shown.err
    assert cli.main(["plan", *SMALL, "--budget", "90%", "--policy", "plain"]) == 1
    assert re.search(
        r"no plan by policy .plain.: the budget .*: policy=.plain. needs \d+ bytes .*; policy=.optimal. fits$",
        capsys.readouterr().err,
    )


def test_a_policy_without_a_plan_on_the_hardware_says_why(tmp_path, capsys):
    arguments = [NET, "--batch", "4", "--image-size", "32", "--hardware", "cpu", "--policy", "vdnn-all"]
    assert cli.main(["plan", *arguments]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "gistkit: no plan by policy 'vdnn-all': policy=\"vdnn-all\" moves tensors to the host, and hardware 'cpu' has "
        'no link to one, or the plan is for a CUDA graph, which holds no transfers; take policy="optimal" or "gist", '
        "or other hardware"
    )
    small_card = tmp_path / "small.json"
    small_card.write_text(replace(PRESETS["titanx"], memory_bytes=10_000, name="small").to_json())
    assert cli.main(["plan", NET, "--image-size", "32", "--hardware", str(small_card), "--policy", "modnn"]) == 1
    assert "by policy 'modnn': the budget must be at least what the step needs, by the" in capsys.readouterr().err


def test_other_statistics_are_marked(capsys):
    arguments = ["tests.commands.test_cli_plan:normed", "--batch", "8", "--image-size", "32", "--hardware", "titanx"]
    arguments += ["--budget", "50%", "--fidelity", "reassociated", "--policy", "modnn"]
    assert cli.main(["plan", *arguments]) == 1 and "/2" not in capsys.readouterr().out
    assert cli.main(["plan", *arguments, "--per-sub-batch-norm"]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())  # a caption may be wrapped
    assert re.search(r"reassociated /\d\*", words) and "* with other statistics of the batch norms" in words


def test_sub_batches_are_those_of_the_function(tmp_path, capsys):
    """Weights that are made in the step are whole in each, though they look like rows."""
    numbers, net = tmp_path / "plan.json", "tests.commands.test_cli_plan:made"
    words = ["--batch", "8", "--image-size", "8", "--hardware", "titanx", "--policy", "modnn"]
    words += ["--budget", "80%", "--fidelity", "reassociated", "--json", str(numbers)]
    assert cli.main(["plan", net, *words]) == 0
    told = json.loads(numbers.read_text())["plan"]
    images, labels = torch.empty(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)
    asked = {"budget": "80%", "policy": "modnn", "fidelity": "reassociated", "hardware": "titanx"}
    plan = gistkit.plan(made(), images, labels, loss_fn=nn.functional.cross_entropy, **asked)
    assert told["sub_batches"] == plan.sub_batches > 1
    assert told["peak_bytes"] + labels.nbytes == plan.peak_bytes  # the command has no labels of its own


def test_a_file_of_hardware_and_what_is_here_by_default(tmp_path, capsys):
    file = tmp_path / "mine.json"
    file.write_text(PRESETS["k40m"].to_json().replace("k40m", "my card"))
    assert cli.main(["profile", NET, "--batch", "2", "--image-size", "32", "--hardware", str(file)]) == 0
    assert "my card" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert cli.main(["profile", NET, "--batch", "2", "--image-size", "32"]) == 0
        assert "h200" in capsys.readouterr().out


def test_engines_of_measured_times_are_chosen_and_shown(tmp_path, capsys):
    file, out = tmp_path / "times.json", tmp_path / "plan.json"
    words = ["tests.commands.test_cli_plan:small", "--batch", "4", "--image-size", "32", "--hardware", "cpu"]
    words += ["--times", str(file)]
    assert cli.main(["profile", *words, "--measure"]) == 0
    times = StepTimes.from_json(file.read_text())
    graph = capture(small(), (torch.empty(4, 3, 32, 32),), backward=True, loss_fn=_loss)
    convs = [t.index for t in graph.tasks if t.conv is not None]
    engines = {t: (Algorithm("engine0", 0.9 * times.seconds[t], 0),) for t in convs}
    own = dict.fromkeys(convs, 2**30)
    file.write_text(replace(times, workspace_bytes=own, engines=engines).to_json())
    capsys.readouterr()
    assert cli.main(["plan", *words, "--budget", "512MiB"]) == 1
    assert "by engines of cuDNN" not in capsys.readouterr().out
    assert cli.main(["plan", *words, "--budget", "512MiB", "--fidelity", "reassociated", "--json", str(out)]) == 0
    assert "by engines of cuDNN: 0 engine0" in capsys.readouterr().out
    made = json.loads(out.read_text())["plan"]
    assert {c["algorithm"] for c in made["choices"]} >= {"engine0"} and made["fidelity"] == "reassociated"


@pytest.mark.parametrize("wrong", ({"name": "winograd"}, {"seconds": 0.0}, {"workspace_bytes": -1}))
def test_engines_of_a_file_of_times_are_checked(wrong):
    times = StepTimes("step", "cpu", 4, 4, 0.1, {0: 0.1})
    good = replace(times, engines={0: (Algorithm("engine1", 0.1, 5),)})
    assert StepTimes.from_json(good.to_json()) == good
    with pytest.raises(ValueError, match="times: engines must be engines with seconds above 0 and bytes"):
        replace(times, engines={0: (replace(Algorithm("engine1", 0.1, 5), **wrong),)})
