"""Decisions for the host: what crosses the link, when, and what lives how long."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.offload import backends
from gistkit.runtime.offload.offloader import Offloader
from gistkit.runtime.program.timetable import timetable
from tests.support.plan_cases import Shared, captured, data, hosted, loss_of, made, same, step


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


@pytest.mark.parametrize("budget_bytes", [None, 2**40])
def test_a_host_without_the_memory_is_an_error_under_a_budget_and_a_note_without(budget_bytes, monkeypatch):
    monkeypatch.setattr(backends, "available_bytes", lambda: 1000)
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    decision = hosted(graph, "relu")
    twin = gistkit.compress(copy.deepcopy(model), made(graph, [decision], budget_bytes=budget_bytes))
    if budget_bytes is not None:
        with pytest.raises(gistkit.PlanError, match=r"on the host, and .* 900 bytes of it are free"):
            step(twin, x, y)
        return
    assert same(step(twin, x, y), step(model, x, y))
    row = next(r for r in gistkit.report(twin).stats.rows if r.storage == decision.storage)
    assert row.kept_bytes == row.plain_bytes and "900 bytes of it are free" in row.reason


def test_it_leaves_and_comes_back_where_the_plan_says():
    """vDNN's window on a chain: gone when the next convolution begins, fetched by the one before its backward."""
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()))).train()
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4) % 3
    graph, costs = captured(model, x, y)
    plan = plan_graph(graph, costs, policy="vdnn-all")
    times = timetable(graph, plan)
    sent = [d for d in plan.decisions if d.on_host]
    assert len(sent) >= 3 and set(times.leaves) == {d.storage for d in sent}
    calls, first = plan.contract.task_calls, plan.contract.backward_from
    for d in sent:
        call = times.leaves[d.storage]
        assert calls.index(call) <= d.release and calls[d.release] in (call, -1)
    for call, due in times.backward.items():
        task = calls.index(call, first)
        for storage in due.fetched:
            d = next(d for d in sent if d.storage == storage)
            assert d.prefetch <= task and set(calls[d.prefetch : task]) <= {-1}
