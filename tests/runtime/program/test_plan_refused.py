"""What a given plan cannot be carried out on is refused by name; what a budget's report says."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import gistkit
from gistkit.errors import PlanError, PlanMismatchError
from gistkit.ir.contract import Contract
from gistkit.ir.plan import Decision
from gistkit.planning.forms.predicted import held
from gistkit.planning.policies.gist_rules import gist
from gistkit.runtime.rebuild.terms import Recipe
from tests.support.models import UNet
from tests.support.plan_cases import BATCH, Shared, Small, captured, data, loss_of, made, same, step


def test_a_decision_that_its_storage_cannot_have_is_refused_before_anything_runs():
    model, (x, y) = Shared().train(), data()
    graph, _ = captured(model, x, y)
    storage = graph.values[next(c for c in graph.calls if c.op == "relu").results[0]].storage
    text = (
        rf"plan is damaged: storage {storage} \(relu, shape \(4, 8, 14, 14\)\) cannot be 'mask1' with place 'device': "
        r"the backward of conv2d \(call 2\) needs its values; give the whole file as to_json wrote it, or plan again"
    )
    for budget in (2**40, None):
        plan = made(graph, [Decision(storage, "mask1")], budget_bytes=budget)
        with pytest.raises(PlanError, match=text):
            step(gistkit.compress(copy.deepcopy(model), plan), x, y)


def test_a_rebuild_that_is_not_exact_breaks_a_budget(monkeypatch):
    monkeypatch.setattr("gistkit.runtime.rebuild.terms.arithmetics", lambda *_: [])
    model, (x, y) = UNet().train(), data()
    graph, _ = captured(model, x, y)
    plan = gist(graph)
    assert any(d.codec == "rebuild" for d in plan.decisions)
    with pytest.raises(PlanError, match="was to be 'rebuild', and it cannot be rebuilt bit for bit on this device"):
        step(gistkit.compress(copy.deepcopy(model), replace(plan, budget_bytes=2**40)), x, y)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert same(step(twin, x, y), step(model, x, y))
    note = "not rebuild as planned: it cannot be rebuilt bit for bit on this device"
    stats = gistkit.report(twin).stats
    assert stats is not None and note in str(stats.rows)


def test_a_rebuild_that_goes_wrong_under_a_budget_is_caught_before_it_is_read(monkeypatch):
    model, (x, y) = UNet().train(), data()
    graph, _ = captured(model, x, y)
    twin = gistkit.compress(copy.deepcopy(model), replace(gist(graph), budget_bytes=2**40))
    right = Recipe.values

    def one_bit_off(self, leaves):
        values = right(self, leaves)
        values.view(-1)[5:6].view(torch.int32).bitwise_xor_(1)
        return values

    monkeypatch.setattr(Recipe, "values", one_bit_off)
    loss = loss_of(twin(x), y)
    text = "was to be 'rebuild', and it cannot be rebuilt bit for bit on this device"
    with pytest.raises(PlanError, match=text):
        loss.backward()
    with pytest.raises(PlanError, match=text):  # it is known now
        twin(x)


def test_other_models_and_larger_batches_are_refused():
    model, (x, y) = Small().train(), data()
    graph, _ = captured(model, x, y)
    plan = made(graph, [])
    other = gistkit.compress(Shared().train(), plan)
    with pytest.raises(PlanMismatchError, match=rf"fingerprint {plan.fingerprint}, got one with fingerprint \w+; make"):
        other(x)
    twin = gistkit.compress(copy.deepcopy(model), plan)
    step(twin, x[:3], y[:3])
    with pytest.raises(
        PlanMismatchError, match="a forward of at most 4 rows, got one of 8 rows; plan for a batch of 8"
    ):
        twin(torch.cat([x, x]))
    step(gistkit.compress(copy.deepcopy(model), replace(plan, budget_bytes=None)), torch.cat([x, x]), torch.cat([y, y]))
    twin.eval()
    with torch.no_grad():
        twin(torch.cat([x, x]))
    with torch.autograd.graph.save_on_cpu(), pytest.raises(PlanMismatchError, match=r"by itself, .* other saved"):
        gistkit.compress(copy.deepcopy(model), plan)(x)
    hooked = copy.deepcopy(model)
    hooked.pool.register_forward_hook(lambda *_: None)
    with pytest.raises(
        PlanMismatchError, match=r"a forward that can be captured, as for the plan, got .* forward hooks"
    ):
        gistkit.compress(hooked, plan)(x)


def test_larger_images_are_refused_however_often_smaller_ones_came():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1)
    model, (x, y) = nn.Sequential(*layers).train(), data()
    graph, _ = captured(model, x, y)
    plan = replace(gist(graph), budget_bytes=2**40, contract=Contract(BATCH))
    assert plan.plain_bytes == graph.kept_bytes == sum(b.nbytes for b in held(graph))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    for size in (8, 16, 8):
        step(twin, x[..., :size, :size], y)
    large, _ = data(32)
    text = rf"saves at most {plan.plain_bytes} bytes in plain PyTorch, .*, got one that saves \d+, of inputs of shape "
    for rows in (4, 2):  # four times the pixels: two rows save more than was planned for four
        shape = rf"\({rows}, 3, 32, 32\); plan for inputs of these sizes"
        with pytest.raises(PlanMismatchError, match=text + shape):
            twin(large[:rows])
        step(twin, large[:1], y[:1])
