"""Convolutions and linear layers by PyTorch's own node: where their inputs beside both gradients do not raise the peak,
bit for bit."""

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


class Images(nn.Module):
    """Three residual blocks of two convolutions, narrower with depth, and a head."""

    def __init__(self, bias=True):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=bias)
        half = lambda w: nn.Sequential(nn.Conv2d(w, w, 3, padding=1, bias=bias), nn.BatchNorm2d(w), nn.ReLU())  # noqa: E731
        self.blocks = nn.ModuleList(nn.Sequential(half(16), half(16)) for _ in range(3))
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=bias)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.down(x + block(x))
        return self.head(x.mean((2, 3)))


def loss_fn(out, t):
    return F.cross_entropy(out.flatten(0, -2), t.flatten())


def case(rows=8, length=16):
    torch.manual_seed(0)
    return torch.randn(rows, length, 32), torch.randint(10, (rows, length))


def gradients(model, x, t):
    gistkit.step(model, loss_fn, x, t)
    return [p.grad for p in model.parameters()]


def checked(model, batch, policy, budget, amp):
    """The joint choices of a plan whose three steps have plain's bits, and no peak above what it says."""
    with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
        expected = gradients(copy.deepcopy(model), *batch)
        plan = gistkit.plan(model, *batch, loss_fn=loss_fn, policy=policy, budget=budget, hardware=LINKLESS)
        gistkit.compress(model, plan)
        for _ in range(3):
            model.zero_grad()
            with LiveBytes(timeline=False) as live:
                live.track(model, *batch)
                found = gradients(model, *batch)
            assert all(map(torch.equal, expected, found))
        assert live.peak_bytes <= plan.peak_bytes <= (plan.budget_bytes or plan.peak_bytes)
    assert gistkit.Plan.from_json(plan.to_json()) == plan
    return [c.op for c in plan.choices if c.joint]


def counted(monkeypatch, module, name):
    """Grows with each call of a function of that name."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: calls.append(name) or function(*a, **k))
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("policy", ["checkpoint", "optimal"])
def test_linear_layers_steps_are_plains_and_within_their_budgets(policy, amp, bias, monkeypatch):
    split = counted(monkeypatch, weighted, "linear")
    joint = checked(Blocks(bias=bias), case(), policy, "95%", amp)
    assert len(joint) >= 3
    assert len(split) == 3 * (5 - len(joint))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("policy", "budget"), [("checkpoint", "95%"), ("optimal", "80%"), ("gist", None)])
def test_convolutions_steps_are_plains_and_within_their_budgets(policy, budget, layout, amp, bias, monkeypatch):
    split = counted(monkeypatch, weighted.conv, "carry_out")
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 32, 32).to(memory_format=layout), torch.randint(10, (8,))
    joint = checked(Images(bias).to(memory_format=layout), batch, policy, budget, amp).count("conv2d")
    assert 3 <= joint < 9, "those of the first block have no room"
    assert len(split) == 3 * (9 - joint)


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
