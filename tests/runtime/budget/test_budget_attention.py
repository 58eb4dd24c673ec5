"""Attention of one tensor with itself under a budget: what it runs anew is the same call again."""

import copy

import pytest
import torch
from torch import nn

import gistkit
from tests.support.peaks import peaks_of


class Attention(nn.Module):
    """Over the pixels."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        larger = nn.ConvTranspose2d(8, 8, 2, 2)
        self.body = nn.Sequential(nn.ReLU(), larger, nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())

    def forward(self, x):
        pixels = x.flatten(2).transpose(1, 2)
        pixels = pixels + self.attention(pixels, pixels, pixels, need_weights=False)[0]
        return self.body(pixels.transpose(1, 2).reshape(x.shape)).square().sum()


def test_self_attention_runs_anew_bit_for_bit():
    """Where query, key and value are one object PyTorch forms them in one product."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(4, 8, 12, 12)
    with pytest.raises(gistkit.BudgetError) as refused:
        gistkit.plan(model, x, budget=1, density=1.0)
    plan = gistkit.plan(model, x, budget=refused.value.least_bytes["bitwise"], density=1.0)
    anew = {d.storage for d in plan.decisions if d.codec == "recompute"}
    graph = gistkit.capture(model, (x,), backward=True)
    attention = {c.index for c in graph.calls if c.op == "multi_head_attention_forward"}
    assert anew & {s.id for s in graph.storages if s.producer in attention}
    assert max(peaks_of(model, plan, x)) <= plan.peak_bytes
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for _ in range(2):
        gradients = []
        for stepped in (model, twin):
            stepped.zero_grad(set_to_none=True)
            stepped(x).backward()
            gradients.append([p.grad for p in stepped.parameters()])
        assert all(map(torch.equal, *gradients))
