"""Replanning from measured steps: the host's seconds are found again, what was measured elsewhere is refused."""

import json
from dataclasses import replace

import pytest
import torch.nn.functional as F

import gistkit
from gistkit import cli
from gistkit.api.measuring import MeasuredStep, fitted, read_steps
from gistkit.api.planning import plan_graph
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.simulate.simulator import simulate
from tests.support.planning_cases import T, X, net

H200 = hardware("h200")


@pytest.fixture(scope="module")
def graph():
    return gistkit.capture(net(), (X,), backward=True, loss_fn=F.cross_entropy, targets=(T,))


def step(graph, policy, **host):
    """A plan made with the preset's host, and its step with another."""
    plan = plan_graph(graph, cost_table(graph, H200), policy=policy)
    return MeasuredStep(plan, simulate(graph, plan, cost_table(graph, replace(H200, **host))).step_s, {})


def test_the_predicted_step_is_the_measured_one(graph):
    costs = cost_table(graph, H200)
    for policy in ("gist", "checkpoint", "vdnn-all", "plain"):
        name = "host_s" if policy == "plain" else "runtime_host_s"
        other = "runtime_host_s" if policy == "plain" else "host_s"
        measured = step(graph, policy, **{name: 3.21e-4})
        found = fitted(graph, costs, [measured])
        assert simulate(graph, measured.plan, found).step_s == pytest.approx(measured.step_s, rel=1e-9)
        assert getattr(found.hardware, name) == pytest.approx(3.21e-4, rel=1e-6), policy
        assert getattr(found.hardware, other) == getattr(H200, other)
        assert found.hardware.source.endswith(f"; {name} 321.0 us, fitted to 1 measured steps")
    three = [step(graph, "gist", runtime_host_s=s) for s in (1e-3, 2e-4, 3e-4)]
    assert fitted(graph, costs, three).hardware.runtime_host_s == pytest.approx(3e-4, rel=1e-6)


def test_what_was_measured_elsewhere_is_refused(graph):
    costs, measured = cost_table(graph, H200), step(graph, "gist")
    plan = measured.plan
    cases = {
        "model": replace(plan, fingerprint="another"),
        "batch": replace(plan, contract=replace(plan.contract, batch=9)),
        "hardware": replace(plan, hardware="titanx"),
    }
    for what, other in cases.items():
        with pytest.raises(ValueError, match=f"^measured steps must be of the {what} planned, .*, got .*; name"):
            fitted(graph, costs, [measured._replace(plan=other)])
    with pytest.raises(ValueError, match=r"step_s must be at least what the device takes, .* 0.000000; measure"):
        fitted(graph, costs, [measured._replace(step_s=1e-9)])


def test_files(graph, tmp_path):
    measured, path = step(graph, "gist"), tmp_path / "steps.json"
    row = {"plan": json.loads(measured.plan.to_json()), "step_s": 0.5, "densities": {"3": 0.25}}
    wanted = MeasuredStep(measured.plan, 0.5, {3: 0.25})
    other = {**row, "note": "gistkit plan --json has further fields"}
    path.write_text(f"{json.dumps(row)}\n\n{json.dumps(other)}\n")
    assert read_steps(path) == [wanted, wanted]
    for text, message in (
        ("", "expected an object, got none"),
        (json.dumps({"step_s": 1.0}), "missing required"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^measured steps .*{message}.*write objects"):
            read_steps(path)
    with pytest.raises(ValueError, match="No such file"):
        read_steps(tmp_path / "nowhere")


def test_the_command(tmp_path, capsys):
    first, again, steps = (tmp_path / name for name in ("plan.json", "again.json", "steps.jsonl"))
    words = ["plan", "alexnet", "--batch", "8", "--image-size", "64", "--hardware", "h200", "--policy", "gist"]
    assert cli.main([*words, "--json", str(first)]) == 0
    made = json.loads(first.read_text())
    steps.write_text(json.dumps({**made, "step_s": 0.1}))
    assert cli.main([*words, "--from-stats", str(steps), "--json", str(again)]) == 0
    assert json.loads(again.read_text())["plan"]["step_s"] == pytest.approx(0.1, rel=1e-9)
    assert "fitted to 1 measured steps" in " ".join(capsys.readouterr().out.split())
    assert cli.main([*words, "--from-stats", str(steps), "--batch", "9"]) == 2
    assert "measured steps must be of the batch planned, 9, got 8;" in capsys.readouterr().err
