"""Segments that run anew beside masks, codecs, the host and other policies' moves: bits and bytes."""

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.plan.plan import Decision
from gistkit.plan.policies.predicted import kept_by_ops, make_plan, own_decisions
from tests.predicted import steady_peak_bytes
from tests.recompute_cases import (
    Chain,
    assert_same,
    between,
    by_hand,
    captured,
    chain,
    measured,
)
from tests.training import batches


def test_a_mask_beside_what_runs_anew():
    model, data = chain(), batches(3, 2, 8)
    graph, costs = captured(model, *data[0])
    relus = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu"]
    plan = by_hand(graph, costs, relus[1:3], (relus[0],), mask=True)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    assert measured(twin, *data[0]) == steady_peak_bytes(graph, plan, costs)


@pytest.mark.parametrize("form", [("zvc", "device"), ("dense", "host"), ("zvc", "host")])
def test_sources_in_other_forms(form):
    codec, place = form
    model, data = chain(), batches(3, 4, 8)
    graph, costs = captured(model, *data[0])
    found = between(graph, costs)
    (source,) = next(d.sources for d in found.decisions if d.codec == "recompute")
    plan = replace(found, decisions=(*found.decisions, Decision(source, codec, place)))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    codecs = [r.codec for r in gistkit.report(twin).stats.rows]
    assert codec in codecs and codecs.count("recompute") == len(found.decisions)


class Residual(nn.Module):
    """relu(bn(conv) + x) out of place: what the Gist policy rebuilds, overwrites, and gives to the pool's map."""

    def __init__(self, pool=False):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.norms, self.pool = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2)), pool

    def forward(self, x):
        y = torch.relu(self.norms[0](self.convs[0](x)))
        y = torch.relu(self.norms[1](self.convs[1](y)) + x)
        return F.max_pool2d(torch.relu(y * 2), 3, 1, 1) if self.pool else y


@pytest.mark.parametrize("seed", range(6))
def test_beside_the_moves_of_another_policy(seed):
    torch.manual_seed(0)
    parts = [Residual(pool=i % 2 == 0) for i in range(4)]
    model, data = Chain(nn.Conv2d(3, 16, 1), *parts, width=16), batches(3, 4, 8)
    graph, costs = captured(model, *data[0])
    other = gistkit.policies.gist(graph)
    own = {d.storage for d in own_decisions(graph)} | kept_by_ops(graph)
    kept = {d.storage: d for d in other.decisions}
    able = [s.id for s in graph.kept() if s.kind == "activation" and s.id not in own and not s.escapes]
    able = [s for s in able if kept.get(s) is None or kept[s].codec in ("dense", "zvc", "csr", "rebuild")]
    chosen = random.Random(seed).sample(able, len(able) // 2)
    source = next(s.id for s in graph.storages if s.kind == "input")
    again = [Decision(s, "recompute", "nowhere", bool(kept[s].mask), (source,)) for s in chosen]
    rest = [d for d in other.decisions if d.storage not in chosen]
    plan = make_plan("by hand", graph, costs, None, (*rest, *again), other.choices)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    rows = {r.storage: r.codec for r in gistkit.report(twin).stats.rows}
    assert [rows[s] for s in chosen] == ["recompute"] * len(chosen)
    assert measured(twin, *data[0]) == steady_peak_bytes(graph, plan, costs)
