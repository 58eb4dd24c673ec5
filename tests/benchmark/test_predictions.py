"""Predicted beside measured seconds: the rows, the networks, what is said of them. On a CPU, at its preset's rates."""

import torch
from torch import nn

from bench import predictions
from bench.networks import Transformer, densenet121
from bench.predictions import CASES, Case, rows, shown
from gistkit.planning.cost.devices import hardware

FIELDS = {"model", "policy", "budget_bytes", "hardware", "rates", "predicted_s", "measured_s", "ratio"}


def small(rows):
    return torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))


def layers():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10)
    )


def test_the_networks_are_the_published_ones():
    assert sum(p.numel() for p in densenet121().parameters()) == 7_978_856
    assert densenet121(10, (1, 1))(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert Transformer(tokens=32, width=64, depth=1)(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 32, 5)


def test_a_row_for_every_policy(monkeypatch):
    monkeypatch.setattr(predictions, "WARM_UP", 0)
    monkeypatch.setattr(predictions, "TIMED", 1)
    monkeypatch.setitem(CASES, "small", Case(layers, small, 4, "90%"))
    found = list(rows("small", ["plain", "gist", "vdnn-all"], "cpu", hardware("cpu"), False, lambda: False))
    assert [row["policy"] for row in found] == ["plain", "gist", "vdnn-all"]
    for row in found[:2]:
        assert row.keys() >= FIELDS and row["ratio"] == row["predicted_s"] / row["measured_s"]
        assert row["rates"] == hardware("cpu").source
        assert shown(row).startswith(f"small {row['policy']}")
    assert found[0]["budget_bytes"] is None and "has no link" in found[2]["error"]
