"""Predicted beside measured seconds: the rows, the networks, what is said of them. On a CPU, at its preset's rates."""

import json

import pytest
import torch
from torch import nn

from bench import predictions
from bench.networks import Transformer, densenet121
from bench.predictions import CASES, RIVALS, Case, Run, Words, main, ranking, rows, shown
from gistkit.planning.cost.devices import hardware

FIELDS = {"model", "policy", "budget_bytes", "hardware", "rates", "predicted_s", "measured_s", "ratio"}
ON_CPU = Run("cpu", hardware("cpu"), False, lambda: False)


def small(rows):
    return torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))


def layers():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)
    )


@pytest.fixture
def small_case(monkeypatch):
    monkeypatch.setattr(predictions, "WARM_UP", 0)
    monkeypatch.setattr(predictions, "TIMED", 1)
    monkeypatch.setitem(CASES, "small", Case(layers, small, 4, "90%"))


def test_the_networks_are_the_published_ones():
    assert sum(p.numel() for p in densenet121().parameters()) == 7_978_856
    assert densenet121(10, (1, 1))(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert Transformer(tokens=32, width=64, depth=1)(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 32, 5)


def test_a_row_for_every_policy(small_case):
    found = list(rows("small", ["plain", "gist", "vdnn-all"], ON_CPU))
    assert [row["policy"] for row in found] == ["plain", "gist", "vdnn-all"]
    for row in found[:2]:
        assert row.keys() >= FIELDS and row["ratio"] == row["predicted_s"] / row["measured_s"]
        assert row["rates"] == hardware("cpu").source
        assert shown(row).startswith(f"small {row['policy']}")
    assert found[0]["budget_bytes"] is None and "has no link" in found[2]["error"]


def test_budgets_precision_and_pytorchs_own_ways(small_case):
    words = Words(8, ("95%", "90%"), "bf16", channels_last=True)
    policies = ["plain", "gist", *(f"torch:{name}" for name in RIVALS)]
    found = list(rows("small", policies, ON_CPU, words))
    assert [(row["policy"], row["budget"]) for row in found] == [
        ("plain", ""), ("torch:checkpoint", ""), ("torch:save_on_cpu", ""), ("gist", "95%"), ("gist", "90%"),
    ]  # fmt: skip
    assert all("error" not in row and row["batch"] == 8 and row["measured_s"] > 0 for row in found)
    assert all(row["channels_last"] for row in found)
    assert words.formatted(torch.zeros(2, 3, 4, 4)).is_contiguous(memory_format=torch.channels_last)
    assert shown(found[1]).startswith("small torch:checkpoint: measured ")
    assert list(rows("small", ["plain", "gist", "vdnn-all"], ON_CPU._replace(over=lambda: True))) == []


def test_a_file_goes_on_where_it_ended(small_case, tmp_path):
    out, lock = tmp_path / "rows.jsonl", tmp_path / "lock"
    words = ["--out", str(out), "--models", "small", "--device", "cpu", "--rates", "cpu", "--lock", str(lock)]
    assert main([*words, "--policies", "plain,gist", "--budgets", "95%"]) == 0
    first = out.read_text()
    assert main([*words, "--policies", "plain,gist", "--budgets", "95%,none", "--rivals"]) == 0
    assert out.read_text().startswith(first) and lock.exists()
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["policy"], row["budget"]) for row in found] == [
        ("plain", ""), ("gist", "95%"), ("torch:checkpoint", ""), ("torch:save_on_cpu", ""), ("gist", ""),
    ]  # fmt: skip
    assert found[1]["measured_times"] and found[1]["budget_bytes"] and found[-1]["budget_bytes"] is None


def test_the_ranking_is_among_those_within_the_budget():
    def row(policy, measured_s, peak_bytes, budget_bytes=100):
        sizes = {"peak_bytes": peak_bytes, "budget_bytes": budget_bytes, "budget": "60%"}
        return {"model": "m", "policy": policy, "measured_s": measured_s, **sizes}

    best = row("optimal", 0.02, 90)
    assert ranking([row("plain", 0.001, 200, None), row("gist", 0.03, 100), best]) == [
        "m in 60%: optimal 20.0 ms, fastest optimal"
    ]
    assert ranking([row("gist", 0.01, 100, None), best]) == ["m in 60%: optimal 20.0 ms, fastest gist"]
    assert ranking([row("gist", 0.01, 100), {"model": "m", "policy": "optimal", "error": "no"}]) == []
