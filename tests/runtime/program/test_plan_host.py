"""Decisions for the host: what crosses the link, when, and what lives how long."""

import copy
from collections import Counter
from dataclasses import replace

import pytest

import gistkit
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.offload.offloader import Offloader
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
    send, fetch = Offloader._send, Offloader._fetch
    monkeypatch.setattr(Offloader, "_send", lambda self, record: out.append(record.parts) or send(self, record))
    monkeypatch.setattr(Offloader, "_fetch", lambda self, record: back.append(record.parts) or fetch(self, record))
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    decision = hosted(graph, "relu", codec)
    twin = gistkit.compress(copy.deepcopy(model), made(graph, [decision]))
    found = step(twin, x, y)
    assert same(found, step(model, x, y))
    parts = 1 if codec == "dense" else 4  # a bitmap, counts, values and no exponents
    assert [len(p) for p in out] == [parts] and out == back


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
