"""Plans are made with the CPU's operators. Where a device's copy an operand, or lay out a result otherwise, what they
save or make is not the graph's storage: it stays, and the bits are plain PyTorch's."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gistkit
from gistkit.errors import PlanError, PlanMismatchError
from tests.support.graphs import Apply

LAST = torch.channels_last


def norms():
    """Group norms of images in channels_last, of which a GPU's make contiguous copies."""
    parts = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    for act in (nn.ReLU(), nn.LeakyReLU(), nn.ReLU(), nn.SiLU()):
        parts += [nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1), act]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)).to(memory_format=LAST)
    return model, torch.randn(8, 3, 16, 16).contiguous(memory_format=LAST), torch.randint(4, (8,))


def mixers():
    """Linear layers that read a layer norm's result through a view, which a result laid out otherwise does not have."""

    def forward(m, x):
        for norm, linear in zip(m[:3], m[3:6], strict=True):
            x = x + F.gelu(linear(norm(x).reshape(-1, 16))).reshape(x.shape)
        return m[6](x.mean(1))

    norms, linears = [nn.LayerNorm(16) for _ in range(3)], [nn.Linear(16, 16) for _ in range(3)]
    return Apply(forward, *norms, *linears, nn.Linear(16, 4)), torch.randn(8, 12, 16), torch.randint(4, (8,))


def sums():
    """The same read by additions, which save no operand."""

    def forward(m, x):
        for norm, linear in zip(m[:3], m[3:6], strict=True):
            x = linear(F.relu(norm(x).reshape(-1, 16) + x.reshape(-1, 16))).reshape(x.shape)
        return m[6](x.mean(1))

    model, x, y = mixers()
    return Apply(forward, *model.parts), x, y


def attentions():
    """Attentions that save their scaled queries and keys, and give a result of another layout, as a GPU's without a
    fused kernel."""

    def forward(m, x):
        for norm, into, out in zip(m[:3], m[3:6], m[6:9], strict=True):
            q, k, v = into(norm(x)).unflatten(-1, (3, 4, 6)).transpose(1, 3).unbind(2)
            with nullcontext() if isinstance(x, FakeTensor) else sdpa_kernel(SDPBackend.MATH):
                y = F.scaled_dot_product_attention(q, k, v)
            x = x + F.relu(out(y.transpose(1, 2).flatten(2)))
        return m[9](x.mean(1))

    parts = [*(nn.LayerNorm(24) for _ in range(3)), *(nn.Linear(24, 72) for _ in range(3))]
    model = Apply(forward, *parts, *(nn.Linear(24, 24) for _ in range(3)), nn.Linear(24, 4))
    return model, torch.randn(8, 16, 24), torch.randint(4, (8,))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Norms of another device than a CPU, except in captures."""
    group_norm, layer_norm = torch.group_norm, torch.layer_norm

    def copying(x, *others):
        return group_norm(x if isinstance(x, FakeTensor) else x.contiguous(), *others)

    def turned(x, *others):
        y = layer_norm(x, *others)
        return y if isinstance(x, FakeTensor) else y.transpose(0, 1).contiguous().transpose(0, 1)

    monkeypatch.setattr(torch, "group_norm", copying)
    monkeypatch.setattr(torch, "layer_norm", turned)


def steps(model, x, y, step):
    found = []
    for _ in range(3):
        model.zero_grad()
        step(model, x, y)
        found += [p.grad.clone() for p in model.parameters()]
    return found


def plain_step(model, x, y):
    F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("made", [norms, mixers, sums, attentions])
def test_what_an_operator_makes_otherwise_than_a_cpus_stays_as_it_is(made, as_on_a_gpu):
    torch.manual_seed(0)
    model, x, y = made()
    plain = copy.deepcopy(model)
    plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="checkpoint")
    bound = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="checkpoint", budget=2 * plan.peak_bytes)
    expected = steps(plain, x, y, plain_step)
    gistkit.compress(model, plan)
    found = steps(model, x, y, lambda m, x, y: gistkit.step(m, F.cross_entropy, x, y))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    rows = gistkit.report(model).stats.rows
    assert any(r.codec == "recompute" for r in rows)
    assert any(
        r.reason.endswith(("a copy that an operator makes for itself", "than the plan's graph says")) for r in rows
    )
    gistkit.restore(model)
    gistkit.compress(model, bound)
    with pytest.raises((PlanError, PlanMismatchError), match=r"(without a|or no) budget"):
        gistkit.step(model, F.cross_entropy, x, y)


def attends(larger):
    """As transformers' networks, which look at real masks before they make their own; ``larger``: one for each head."""

    def forward(m, x):
        if isinstance(x, FakeTensor):
            keep = torch.ones(16, 16, dtype=torch.bool).tril()
        else:
            keep = torch.arange(16)[:, None] >= torch.arange(16)
            keep = keep.repeat(2, 4, 1, 1) if larger else keep
        for first, last in zip(m[0::2], m[1::2], strict=True):
            heads = first(x).view(2, 16, 4, 8).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(heads, heads, heads, keep)
            x = x + last(mixed.transpose(1, 2).flatten(2)).tanh()
        return x.square().mean()

    torch.manual_seed(0)
    return Apply(forward, *(nn.Linear(32, 32) for _ in range(8))), torch.randn(2, 16, 32)


@pytest.mark.parametrize("words", [{"policy": "checkpoint"}, {"budget": "80%"}], ids=str)
def test_a_mask_that_forwards_make_by_other_calls_than_their_capture(words):
    """The tensor is held for the segment, for which a budget has room."""
    model, x = attends(larger=False)
    plan = gistkit.plan(model, x, loss_fn=lambda loss: loss, **words)
    assert any(d.codec == "recompute" for d in plan.decisions)
    plain = copy.deepcopy(model)
    gistkit.compress(model, plan)
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad(set_to_none=True)
            with gistkit.LiveBytes(timeline=False) as live:
                live.track(m, x)
                m(x).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert live.peak_bytes <= (plan.budget_bytes or live.peak_bytes)


def test_a_mask_larger_than_planned_has_no_room_under_a_budget():
    model, x = attends(larger=True)
    gistkit.compress(model, gistkit.plan(model, x, loss_fn=lambda loss: loss, budget="80%"))
    with pytest.raises(PlanMismatchError, match=r"to read storage .* of the plan's graph, got another tensor"):
        model(x)
