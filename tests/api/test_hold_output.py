"""A plan of a step that lets go of the model's output when the loss is there: to the byte what gistkit.step takes."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.planning.cost import PRESETS, cost_table
from gistkit.planning.policies import POLICIES
from gistkit.planning.simulate import Simulator
from gistkit.runtime.live import LiveBytes

TOKENS, ROWS, LENGTH = 2000, 4, 64


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def case():
    torch.manual_seed(0)
    width = 32
    block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
    model = nn.Sequential(nn.Embedding(TOKENS, width), block, nn.Linear(width, TOKENS, bias=False))
    return model, torch.randint(TOKENS, (ROWS, LENGTH)), torch.randint(TOKENS, (ROWS, LENGTH))


def peak_of(step, *tracked):
    with LiveBytes(timeline=False) as live:
        live.track(*tracked)
        step()
    return live.peak_bytes


@pytest.mark.parametrize("amp", [False, True])
def test_a_plan_of_plain_pytorch_is_a_steps_to_the_byte(amp):
    model, x, t = case()
    output_bytes = ROWS * LENGTH * TOKENS * (2 if amp else 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        plan = gistkit.plan(model, x, t, loss_fn=loss_fn, policy="plain", hardware=PRESETS["cpu"], hold_output=False)
        held = gistkit.plan(model, x, t, loss_fn=loss_fn, policy="plain", hardware=PRESETS["cpu"])
        assert peak_of(lambda: gistkit.step(model, loss_fn, x, t), model, x, t) == plan.peak_bytes
    assert held.peak_bytes == plan.peak_bytes + output_bytes


@pytest.mark.parametrize(("budget", "fidelity"), [("99%", "bitwise"), ("60%", "reassociated")])
def test_a_budget_holds_in_steps(budget, fidelity):
    model, x, t = case()
    reference = copy.deepcopy(model)
    gistkit.step(reference, loss_fn, x, t)
    words = {"loss_fn": loss_fn, "hardware": PRESETS["cpu"], "fidelity": fidelity, "hold_output": False}
    plan = gistkit.plan(model, x, t, budget=budget, **words)
    assert (plan.sub_batches > 1) == (fidelity == "reassociated")
    gistkit.compress(model, plan)
    step = lambda: gistkit.step(model, loss_fn, x, t, verify=False)  # noqa: E731
    for _ in range(3):
        model.zero_grad()
        assert peak_of(step, model, x, t) <= plan.peak_bytes <= plan.budget_bytes
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        # 256 tokens' terms in another order: as many roundings of what is no larger than the largest gradient
        off = (found.grad - expected.grad).abs().max()
        assert off <= (0 if fidelity == "bitwise" else 256 * 2**-24 * expected.grad.abs().max())


def test_any_other_word_is_refused():
    model, x, t = case()
    with pytest.raises(TypeError, match=r"plan: hold_output must be True or False, got 1; False is for gistkit\.step"):
        gistkit.plan(model, x, t, loss_fn=loss_fn, hold_output=1)


def test_sub_batches_let_go_of_their_outputs():
    model, x, t = case()
    peaks = {}
    for hold in (True, False):
        graph = gistkit.capture(model, (x,), backward=True, loss_fn=loss_fn, targets=(t,), hold_output=hold)
        costs = cost_table(graph, PRESETS["cpu"])
        plan, simulator = POLICIES["checkpoint"](graph, costs), Simulator(graph, costs)
        peaks[hold] = [simulator.run(replace(plan, sub_batches=parts)).peak_bytes for parts in (1, 2, 4)]
    assert peaks[True][0] == peaks[False][0] + 4 * ROWS * LENGTH * TOKENS
    assert peaks[True][1:] == peaks[False][1:]


class Remembering(nn.Module):
    """Its output outlives the step."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = case()[0], None

    def forward(self, x):
        self.last = self.inner(x)
        return self.last


def test_an_output_that_the_model_holds_is_not_released():
    _, x, t = case()
    graph = gistkit.capture(Remembering(), (x,), backward=True, loss_fn=loss_fn, targets=(t,))
    assert all(b.released < 0 for b in graph.blocks)
    graph = gistkit.capture(case()[0], (x,), backward=True, loss_fn=loss_fn, targets=(t,))
    assert [b.nbytes for b in graph.blocks if b.released >= 0] == [4 * ROWS * LENGTH * TOKENS]
