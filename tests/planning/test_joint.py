"""Linear layers by PyTorch's own node: where their inputs beside both gradients do not raise the peak, bit for bit."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning import with_joint_gradients
from gistkit.planning.cost import PRESETS, cost_table
from gistkit.planning.policies import POLICIES
from gistkit.planning.simulate import Simulator
from gistkit.runtime.calls import weighted
from gistkit.runtime.live import LiveBytes

LINKLESS = replace(PRESETS["cpu"], d2h_gbps=0.0, h2d_gbps=0.0, both_gbps=0.0)


class Blocks(nn.Module):
    """Two residual blocks of a norm and two linear layers over tokens, and a head."""

    def __init__(self, width=32, bias=True):
        super().__init__()
        layers = lambda: (nn.LayerNorm(width), nn.Linear(width, 64, bias), nn.GELU(), nn.Linear(64, width, bias))  # noqa: E731
        self.blocks = nn.ModuleList(nn.Sequential(*layers()) for _ in range(2))
        self.head = nn.Linear(width, 10, bias)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_fn(out, t):
    return F.cross_entropy(out.flatten(0, -2), t.flatten())


def case(rows=8, length=16):
    torch.manual_seed(0)
    return torch.randn(rows, length, 32), torch.randint(10, (rows, length))


def gradients(model, x, t):
    gistkit.step(model, loss_fn, x, t)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("policy", ["checkpoint", "optimal"])
def test_steps_are_plains_and_within_their_budgets(policy, amp, bias, monkeypatch):
    split = []
    by_parts = weighted.linear
    monkeypatch.setattr(weighted, "linear", lambda *a, **k: split.append(len(a)) or by_parts(*a, **k))
    model, (x, t) = Blocks(bias=bias), case()
    with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
        expected = gradients(copy.deepcopy(model), x, t)
        plan = gistkit.plan(model, x, t, loss_fn=loss_fn, policy=policy, budget="95%", hardware=LINKLESS)
        joint = sum(c.joint for c in plan.choices)
        assert joint >= 3
        gistkit.compress(model, plan)
        for _ in range(3):
            model.zero_grad()
            with LiveBytes(timeline=False) as live:
                live.track(model, x, t)
                found = gradients(model, x, t)
            assert all(map(torch.equal, expected, found))
        assert live.peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    assert len(split) == 3 * (5 - joint)
    assert gistkit.Plan.from_json(plan.to_json()) == plan


def test_an_input_that_would_raise_the_peak_goes_first():
    model = nn.Sequential(nn.Linear(512, 4), nn.Linear(4, 512))
    graph = gistkit.capture(model, (torch.randn(64, 512, requires_grad=True),), backward=True)
    costs = cost_table(graph, LINKLESS)
    simulator, before = Simulator(graph, costs), POLICIES["gist"](graph, costs)
    plan = with_joint_gradients(graph, costs, before)
    assert simulator.run(plan).peak_bytes == simulator.run(before).peak_bytes
    for choice in (gistkit.CallChoice(c.covered, "linear", joint=True) for c in graph.calls if c.covered >= 0):
        higher = simulator.run(replace(before, choices=(choice,))).peak_bytes > before.peak_bytes
        assert higher == (choice not in plan.choices), choice
    assert len(plan.choices) < 2
    assert with_joint_gradients(graph, costs, POLICIES["plain"](graph, costs)).choices == ()


@pytest.mark.parametrize(("width", "wide", "length"), [(32, 64, 8), (48, 128, 8), (64, 128, 16)])
def test_an_input_has_room_beside_the_product_and_the_sum_of_its_gradient(width, wide, length):
    model = nn.TransformerDecoderLayer(width, 4, wide, batch_first=True)
    graph = gistkit.capture(model, (torch.randn(4, length, width), torch.randn(4, 8, width)), backward=True)
    costs = cost_table(graph, LINKLESS)
    before = POLICIES["gist"](graph, costs)
    plan = with_joint_gradients(graph, costs, before)
    assert Simulator(graph, costs).run(plan).peak_bytes == before.peak_bytes
