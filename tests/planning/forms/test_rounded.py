"""Who may be given rounded values: no divisor, power or logarithm, and no ReLU without a mask of its own."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import gistkit
from gistkit.api.capturing import step_on
from gistkit.errors import PlanError
from gistkit.ir.queries import Reading
from gistkit.planning.cost.table import cost_table
from gistkit.planning.forms.readers import may_narrow
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.policies.optimal.plans import plan_of
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.variants import Allowed
from gistkit.planning.simulate.simulator import Simulator
from tests.planning.policies.test_optimal_state import choices
from tests.support.models import Call

X = torch.randn(8, 3, 24, 24, generator=torch.Generator().manual_seed(0))
STRICT = {"a power": lambda y: y.pow(1.3), "a divisor": lambda y: y / (1 + y)}


def net(read, count=4, channels=8):
    """Convolution, batch norm, ReLU; what ``read`` makes of it goes into the next."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(count):
        layers += nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), Call(read)
    return nn.Sequential(*layers, Call(lambda h: h.mean((2, 3)).pow(2).sum()))


def rounded(plan, storage, above=()):
    """Whether a storage comes back from rounded values."""
    found = next((d for d in plan.decisions if d.storage == storage), None)
    if found is None or storage in above:
        return False
    return bool(found.form.rounds_to) or any(rounded(plan, s, (*above, storage)) for s in found.sources)


def wrongly_rounded(graph, plan):
    """Storages that come back rounded for a reader that may not be given such values."""
    reading, masks = Reading(graph), {d.storage: d.mask for d in plan.decisions}
    for s in graph.kept():
        uses = reading.uses(s.id)
        strict = [c.op for c, save in uses.readers if not may_narrow(c, save)]
        codec = next((d.codec for d in plan.decisions if d.storage == s.id), "dense")
        unmasked = uses.relu is not None and codec == "recompute" and not masks[s.id]
        if (strict or unmasked) and rounded(plan, s.id):
            yield s.id, strict, codec


@pytest.mark.parametrize("name", STRICT)
def test_gist_rebuilds_nothing_from_rounded_values_for_a_strict_reader(name):
    model = net(STRICT[name], 2)
    graph = gistkit.capture(model, (X,))
    plan = gist(graph, lossy="fp8")
    codecs = [d.codec for d in plan.decisions]
    assert plan.fidelity == "lossy" and "fp8" in codecs and not list(wrongly_rounded(graph, plan))
    assert "rebuild" not in codecs
    assert "rebuild" in [d.codec for d in gist(graph).decisions], "from what is kept as it is, it may"


def test_no_choice_of_optimal_brings_rounded_values_back_for_a_strict_reader():
    graph, device = step_on("plan", net(STRICT["a power"], 5, 16), (X,), None, "cpu")
    costs = cost_table(graph, device)
    problem, both = Problem(graph, costs, Simulator(graph, costs), Allowed("lossy", "fp8")), 0
    for state in choices(problem, random.Random(0), 60):
        plan = plan_of(problem, state.taken)
        assert not list(wrongly_rounded(graph, plan))
        both += len({"fp8", "recompute"} & {d.codec for d in plan.decisions}) == 2
    assert both > 3


def test_a_file_that_rounds_for_a_strict_reader_is_refused():
    model = net(STRICT["a power"], 2)
    plan = gistkit.plan(model, X, policy="gist")
    graph = gistkit.capture(model, (X,))
    made = next(d for d in plan.decisions if d.codec == "rebuild")

    def edited(**how):
        changes = {made.sources[0]: {"codec": "fp8"}, made.storage: how}
        decisions = tuple(replace(d, **changes.get(d.storage, {})) for d in plan.decisions)
        return replace(plan, decisions=decisions, fidelity="lossy")

    for how, text in (
        ({}, r"cannot be 'rebuild'.*: the backward of pow \(call \d+\) takes no rounded values, and what it follows"),
        (
            {"codec": "recompute", "recipe": ()},
            rf"recompute from storage {made.sources[0]}, which comes back rounded, but the backward of pow of",
        ),
    ):
        with pytest.raises(PlanError, match=text):
            gistkit.compress(copy.deepcopy(model), edited(**how))(X)
    assert list(wrongly_rounded(graph, edited()))


def test_a_relu_without_a_mask_does_not_come_back_from_rounded_values():
    model = nn.Sequential(*(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(2)), nn.ReLU())
    model.append(nn.Conv2d(8, 8, 3, padding=1))
    plan = gistkit.plan(model, X, policy="gist")
    graph = gistkit.capture(model, (X,))
    source, relu = (next(c for c in graph.calls if c.op == op and c.module == m) for op, m in
                    (("conv2d", "0"), ("relu", "2")))  # fmt: skip
    kept, again = (graph.values[c.results[0]].storage for c in (source, relu))
    changes = {kept: {"codec": "fp8"}, again: {"codec": "recompute", "place": "nowhere", "sources": (kept,)}}
    decisions = tuple(replace(d, **changes.get(d.storage, {})) for d in plan.decisions)
    wrong = replace(plan, decisions=decisions, fidelity="lossy")
    with pytest.raises(PlanError, match=r"backward of relu of 2 .*takes no rounded values; keep one of the two exact"):
        gistkit.compress(copy.deepcopy(model), wrong)(X)
    masked = tuple(replace(d, mask=True) if d.storage == again else d for d in decisions)
    gistkit.compress(copy.deepcopy(model), replace(wrong, decisions=masked))(X).sum().backward()
