"""Segments that run anew beside masks, codecs, the host and other policies' moves: bits and bytes."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrizations import weight_norm

import gistkit
from gistkit.ir.plan import Decision
from gistkit.planning.forms.allowed import kept_by_ops, own_decisions
from gistkit.planning.forms.predicted import make_plan
from gistkit.runtime.live import LiveBytes
from tests.support.peaks import steady_peak_bytes
from tests.support.recompute_cases import Chain, block, by_hand, captured, measured
from tests.support.training import assert_same, batches


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


@pytest.mark.parametrize("seed", range(2))
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


class Normed(nn.Module):
    """Weights that are made in the step, of convolutions and of linear layers, square ones too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.e = (weight_norm(nn.Conv2d(i, 16, 3, padding=1)) for i in (3, 16, 16))
        self.c, self.d = weight_norm(nn.Linear(64, 64)), weight_norm(nn.Linear(64, 10))

    def forward(self, x):
        x = F.relu(self.e(F.relu(self.b(F.relu(self.a(x))))))
        return self.d(F.relu(self.c(F.adaptive_avg_pool2d(x, 2).flatten(1).float())))


@pytest.mark.parametrize(("words", "batch"), [({}, 8), ({"budget": "100%"}, 64)], ids=str)
def test_casts_of_weights_that_are_made_in_the_step_come_back(words, batch):
    torch.manual_seed(0)
    model, x, y = Normed(), torch.randn(batch, 3, 16, 16), torch.randint(10, (batch,))

    def step(m):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        F.cross_entropy(out.float(), y).backward()
        return [p.grad for p in m.parameters()]

    with torch.autocast("cpu", torch.bfloat16):
        words = {"policy": "checkpoint", "loss_fn": lambda out, t: F.cross_entropy(out.float(), t), **words}
        plan = gistkit.plan(model, x, y, **words)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    expected = step(model)
    assert all(map(torch.equal, expected, step(twin))), "the first time it is compared"
    twin.zero_grad()
    with LiveBytes(timeline=False) as live:
        live.track(twin, x, y)
        assert all(map(torch.equal, expected, step(twin)))
    assert live.peak_bytes <= (plan.budget_bytes or live.peak_bytes)
    again = [r for r in gistkit.report(twin).stats.rows if r.codec == "recompute"]
    assert len(again) == sum(d.codec == "recompute" for d in plan.decisions) > 2


class Looks(nn.Module):
    """As transformers: it looks for padding in its tokens, which it cannot on fake tensors, where it makes a mask that
    hides nothing."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(50, 16), nn.Embedding(8, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Attends() for _ in range(3))

    def forward(self, ids):
        shown = ids.ge(1)
        if isinstance(ids, FakeTensor) or 0 in ids[:, [-1, 0]] or not shown.all():
            mask = (torch.arange(8).ge(0) & shown)[:, None, None].expand(-1, 1, 8, 8)
        else:
            mask = None
        x = self.tokens(ids) + self.places(torch.arange(8).add(0))
        for part in self.blocks:
            x = part(x, mask)
        return self.head(x.mean(1))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x, mask):
        y = F.gelu(self.a(self.norm(x)))[:, None]
        return x + self.b(F.scaled_dot_product_attention(y, y, y * 2, attn_mask=mask)[:, 0])


@pytest.mark.parametrize("padded", (False, True))
def test_a_model_that_looks_at_its_inputs_makes_other_calls_than_on_fake_tensors(padded):
    torch.manual_seed(0)
    model = Looks()
    data = [(torch.randint(1, 50, (32, 8)), torch.randint(10, (32,))) for _ in range(3)]
    if padded:
        data[1][0][:9, -1:] = 0
    plan = gistkit.plan(model, *data[0], loss_fn=F.cross_entropy, budget="60%")
    graph = gistkit.capture(model, (data[0][0],), on_cpu=True)
    again = {d.storage for d in plan.decisions if d.codec == "recompute"}
    assert again & {s.storage for c in graph.calls if c.op == "scaled_dot_product_attention" for s in c.saves}
    assert_same(model, gistkit.compress(copy.deepcopy(model), plan), data)


class Biased(nn.Module):
    """An attention over pixels with a trained bias: PyTorch takes another kernel where it needs no gradient."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        rows = x.flatten(2).mT.unsqueeze(1).contiguous()
        y = F.scaled_dot_product_attention(rows, rows, rows, attn_mask=self.bias * 2)
        return y.squeeze(1).mT.reshape(x.shape) * 3


def test_an_attention_runs_anew_by_the_kernel_of_forward():
    torch.manual_seed(0)
    model, data = Chain(block(3, 32), Biased(), block(32, 32), width=32), batches(3, 8, 8)
    graph, costs = captured(model, *data[0])
    source = next(graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu")
    tripled = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "mul"][-1]
    twin = gistkit.compress(copy.deepcopy(model), by_hand(graph, costs, [tripled], [source]))
    assert_same(model, twin, data)
    assert {r.storage: r.codec for r in gistkit.report(twin).stats.rows}[tripled] == "recompute"
