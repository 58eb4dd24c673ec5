"""Which decisions a plan may hold: every form that the judge allows is carried out to the bit, every other refused."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.api.planning import plan_graph
from gistkit.errors import BudgetError, PlanError
from gistkit.ir.forms import FORMS, RERUN
from gistkit.ir.plan import Decision
from gistkit.planning.forms.allowed import Judge, check_decisions
from gistkit.planning.policies.registry import POLICIES
from tests.support.graphs import Apply, output_of
from tests.support.plan_cases import captured, data, loss_of, made, same, step


def residual(m, x):
    """What rebuilds start from, a pool that carries a mask, an uncovered activation, a dropout."""
    x = F.max_pool2d(F.relu(m[0](x)), 2)
    y = F.relu(m[3](m[1](x)))
    y = F.relu(x + m[4](m[2](y)))
    return m[5](F.dropout(F.silu(y), 0.3).mean((2, 3)))


@pytest.fixture(scope="module")
def case():
    """A model, its batch, its step's graph and costs, and the graph of the forward that runs."""
    torch.manual_seed(0)
    convs = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8))
    model, (x, y) = Apply(residual, *convs, nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 4)), data()
    return model, x, y, *captured(model, x, y), gistkit.capture(model, (x,))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_policies_decide_is_legal(policy, case):
    *_, graph, costs, running = case
    for words in ({}, {"fidelity": "lossy", "lossy": "fp8"}):
        try:
            plan = plan_graph(graph, costs, policy=policy, budget="70%", refuse=False, **words)
        except (BudgetError, ValueError):
            continue
        check_decisions(plan, running)


def test_every_allowed_form_is_carried_out_and_no_other(case):
    model, x, y, graph, _, running = case
    judge, expected = Judge(running), step(copy.deepcopy(model), x, y)
    seen = set()
    for s in judge.graph.kept():
        allowed = {d.codec: d for d in judge.allowed(s.id)}
        assert "dense" in allowed and all(d.reason for d in allowed.values())
        for name, form in FORMS.items():
            decision = allowed.get(name, Decision(s.id, name, "device" if form.payload else "nowhere"))
            assert (judge.refusal(decision, {}.get) == "") == (name in allowed), (s, name)
        exact = [d for d in allowed.values() if not d.form.rounds_to and d.form.returns != RERUN]
        maker = judge.graph.calls[s.producer].op if s.producer >= 0 else ""
        for decision in (d for d in exact if (d.codec, maker) not in seen):
            seen.add((decision.codec, maker))
            plan = made(graph, [decision])
            assert same(step(gistkit.compress(copy.deepcopy(model), plan), x, y), expected), decision


def test_every_reason_is_told(case):
    model, x, y, graph, _, running = case
    relu, conv = output_of(graph, "relu", 1), output_of(graph, "conv2d", 1)
    (pool,) = (s.storage for c in graph.calls if c.op == "max_pool2d" for s in c.saves if s.dtype == "int64")
    plan = gistkit.plan(model, x, y, loss_fn=loss_of, policy="gist")
    (rebuilt, *_) = (d for d in plan.decisions if d.codec == "rebuild" and d.storage == relu)
    cases = [
        (Decision(relu, "mask1"), r"needs its values"),
        (Decision(conv, "drop"), r"backward of batch_norm \(call \d+\) needs its values"),
        (Decision(conv, "argmax4"), r"needs its values"),
        (Decision(conv, "zvc", "nowhere"), r"its payload must be somewhere"),
        (replace(rebuilt, place="host"), r"what has no payload is in no place"),
        (replace(rebuilt, sources=()), r"it comes about as \('relu', \('bn', \d+\)\) from storages"),
        (replace(rebuilt, storage=conv), r"it does not follow from what batch norms and additions read"),
        (Decision(conv, "bits"), r"its dtype is float32"),
        (Decision(pool, "zvc"), r"its op keeps it for itself in a form of its own"),
        (Decision(relu, "fp16"), r"needs a mask beside rounded values"),
        (Decision(next(s.id for s in graph.storages if s.kind == "parameter"), "zvc"), r"it is a parameter"),
    ]
    for decision, text in cases:
        plan = made(graph, [decision], fidelity="lossy")
        with pytest.raises(PlanError, match=rf"plan is damaged: storage {decision.storage} \(.*: .*{text}.*plan again"):
            check_decisions(plan, running)
