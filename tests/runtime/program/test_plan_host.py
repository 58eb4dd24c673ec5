"""Decisions for the host: what crosses the link, when, and what lives how long."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning.policies.gist_rules import gist
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.offload import host
from tests.support.models import UNet
from tests.support.plan_cases import Shared, captured, data, hosted, loss_of, made, same, step, ways


def test_lossy_forms_on_the_host_are_those_on_the_device():
    model, (x, y) = UNet().train(), data()
    graph, costs = captured(model, x, y)
    results = []
    for place in ("device", "host"):
        decisions = [d for d in ways(graph, costs, 9, "device", "fp8") if d.codec != "rebuild"]
        if place == "host":
            decisions = list(ways(graph, costs, 9, "host", "fp8"))
            assert Counter(d.codec for d in decisions)["fp8"] > 5
        else:
            by_storage = {d.storage: d for d in ways(graph, costs, 9, "host", "fp8")}
            decisions = [replace(d, place="device", release=-1, prefetch=-1) for d in by_storage.values()]
        results.append(step(gistkit.compress(copy.deepcopy(model), made(graph, decisions)), x, y))
    assert same(*results)
    assert not same(results[0], step(copy.deepcopy(model), x, y))


@pytest.mark.parametrize("codec", ["dense", "zvc"])
def test_a_payload_crosses_once_each_way_whoever_reads_it(codec, monkeypatch):
    out, back = [], []
    sent, fetched = host.sent, host.fetched
    monkeypatch.setattr(host, "sent", lambda t: out.append(t.numel()) or sent(t))
    monkeypatch.setattr(host, "fetched", lambda t, device: back.append(t.numel()) or fetched(t, device))
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    decision = hosted(graph, "relu", codec)
    twin = gistkit.compress(copy.deepcopy(model), made(graph, [decision]))
    found = step(twin, x, y)
    assert same(found, step(model, x, y))
    parts = 1 if codec == "dense" else 4  # a bitmap, counts, values and no exponents
    assert len(out) == parts and out == back


def test_what_is_on_the_host_is_not_on_the_device_and_goes_with_its_last_reader():
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    decision = hosted(graph, "relu")
    nbytes = graph.storages[decision.storage].nbytes
    kept = {}
    for name, decisions in (("device", []), ("host", [decision])):
        twin = gistkit.compress(copy.deepcopy(model), made(graph, decisions))
        step(twin, x, y)
        with LiveBytes() as live:
            loss = loss_of(twin(x), y)
            kept[name] = live.current_bytes
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
        rows = {r.storage: r for r in gistkit.report(twin).stats.rows}
        assert rows[decision.storage].kept_bytes == (0 if name == "host" else nbytes)
        gradients = sum(p.nbytes for p in model.parameters())
        assert live.current_bytes <= gradients
    assert kept["device"] - kept["host"] == nbytes


class Own(nn.Module):
    """A ReLU that only a mean reads, a pool and a dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.pool, self.drop, self.head = (
            nn.Conv2d(3, 8, 1),
            nn.MaxPool2d(2),
            nn.Dropout(),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x):
        return self.head(self.drop(self.pool(F.avg_pool2d(self.first(x).relu(), 2))))


def test_what_ops_keep_for_themselves_goes_to_the_host_too():
    """A ReLU's mask, a pool's map and a dropout's bits, none of which a value lies in."""
    model, (x, y) = Own().train(), data(32)
    graph, _ = captured(model, x, y)
    own = [d for d in gist(graph).decisions if d.codec in ("mask1", "argmax4", "bits")]
    assert [d.codec for d in own] == ["mask1", "argmax4", "bits"]
    results, kept = [], []
    for place in ("device", "host"):
        decisions = [replace(d, place=place, release=9, prefetch=12) for d in own]
        twin = gistkit.compress(copy.deepcopy(model), made(graph, decisions))
        results.append(step(twin, x, y))
        rows = [
            r for r in gistkit.report(twin).stats.rows if r.op in ("relu", "max_pool2d", "dropout") and r.storage < 0
        ]
        kept.append(sum(r.kept_bytes for r in rows))
    pooled = 4 * 8 * 8 * 8
    assert kept == [4 * pooled // 8 * 4 + pooled // 2 + pooled // 8, 0]
    assert same(*results) and same(results[0], step(model, x, y))


class Alike(nn.Module):
    """Uncovered ops that save three tensors of one shape between two covered calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)

    def forward(self, x):
        x = self.conv(x)
        return self.head(torch.tanh(torch.sigmoid(torch.exp(x))))


@pytest.mark.parametrize("chosen", [(), ("exp",), ("sigmoid",), ("tanh",), ("exp", "tanh")])
def test_uncovered_saves_of_one_shape_are_told_apart_by_their_order(chosen, monkeypatch):
    out = []
    sent = host.sent
    monkeypatch.setattr(host, "sent", lambda t: out.append(t.clone()) or sent(t))
    model, (x, y) = Alike().train(), data()
    graph, _ = captured(model, x, y)
    twin = gistkit.compress(copy.deepcopy(model), made(graph, [hosted(graph, op) for op in chosen]))
    assert same(step(twin, x, y), step(copy.deepcopy(model), x, y))
    with torch.no_grad():
        values = {"exp": torch.exp(model.conv(x))}
        values["sigmoid"] = torch.sigmoid(values["exp"])
        values["tanh"] = torch.tanh(values["sigmoid"])
    assert len(out) == len(chosen) and all(torch.equal(t, values[op]) for t, op in zip(out, chosen, strict=True))
