"""What cannot run anew, or does not give the same bits: kept, or refused by name."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import GistError, PlanError
from gistkit.ir.plan import Decision
from gistkit.planning.forms.predicted import make_plan
from gistkit.runtime.recompute import replay as recompute_replay
from tests.support.recompute_cases import (
    Chain,
    Hidden,
    between,
    block,
    by_hand,
    captured,
    chain,
    planned,
)
from tests.support.training import assert_same, batches


@pytest.fixture
def values_off(monkeypatch):
    """Every batch norm that runs anew gives other values."""
    run = recompute_replay._call

    def call_of(call, leaves):
        result = run(call, leaves)
        if call.name == "batch_norm":
            result.add_(1)
        return result

    monkeypatch.setattr(recompute_replay, "_call", call_of)


def test_what_does_not_come_back_is_an_error_once_and_stays_from_then_on(values_off):
    model, data = chain(), batches(3, 2, 8)
    twin = gistkit.compress(copy.deepcopy(model), planned(model, *data[0]))
    errors = 0
    for _ in range(20):
        try:
            F.cross_entropy(twin(data[0][0]), data[0][1]).backward()
        except GistError as error:
            assert "did not come back bit for bit" in str(error) and "run the step again" in str(error)
            errors += 1
    twin.load_state_dict(model.state_dict())
    twin.zero_grad()
    assert errors and assert_same(model, twin, data) is None
    reasons = {r.reason for r in gistkit.report(twin).stats.rows if r.codec == "dense"}
    assert "not recompute as planned: it does not come back bit for bit on this device" in reasons


def test_a_budget_refuses_what_does_not_come_back(values_off):
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    twin = gistkit.compress(model, planned(model, x, t, budget=10**9))
    loss = F.cross_entropy(twin(x), t)
    text = r"budget cannot be kept: storage \d+ \(.*'recompute', and it does not come"
    with pytest.raises(PlanError, match=text):
        loss.backward()
    with pytest.raises(PlanError, match=text):  # it is known now
        twin(x)


class Counts(nn.Module):
    """A norm that updates running statistics by a call that is not batch_norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.instance_norm(x, self.mean, self.var, use_input_stats=True)


def handed(x, extra=None):
    """A torch function that takes any object."""
    if torch._C._is_torch_function_mode_enabled():
        return torch.overrides.handle_torch_function(handed, (x,), x, extra)
    return torch.sinh(x) * x


class Handed(nn.Module):
    def __init__(self):
        super().__init__()
        self.extra = None

    def forward(self, x):
        return handed(x, self.extra)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            Hidden,
            r"recompute runs Unseen of .*anew, which is no call of a torch function .*; keep what it makes",
        ),
        (
            Counts,
            r"recompute runs instance_norm of blocks.2 .* anew, which writes to storage \d+ \(buffer\) that out",
        ),
    ],
)
def test_what_cannot_run_anew_is_refused_by_name(part, text):
    torch.manual_seed(0)
    model = Chain(block(3, 8), block(8, 8), part(), block(8, 8), block(8, 8))
    x = torch.randn(2, 3, 8, 8)
    plan = between(gistkit.capture(model, (x,), on_cpu=True))
    with pytest.raises(PlanError, match=text):
        gistkit.compress(model, plan)(x)


def test_an_argument_that_cannot_be_kept_is_refused():
    torch.manual_seed(0)
    model = Chain(block(3, 8), block(8, 8), Handed(), block(8, 8), block(8, 8))
    data = batches(2, 2, 8)
    plan = between(*captured(model, *data[0]))
    twin = gistkit.compress(copy.deepcopy(model), plan)
    assert_same(model, twin, data)
    twin.blocks[2].extra = object()
    with pytest.raises(PlanError, match=r"handed of blocks.2 \(call \d+\) anew, whose argument of type object cannot"):
        twin(data[0][0])


def test_sources_must_be_kept_and_ops_keep_their_own():
    model, (x, t) = chain(), batches(1, 2, 8)[0]
    graph, costs = captured(model, x, t)
    relus = [graph.values[c.results[0]].storage for c in graph.calls if c.op == "relu"]
    with pytest.raises(PlanError, match=rf"from storage {relus[1]}, which 'recompute' does not keep with its values"):
        make_plan(
            "by hand", graph, costs, None,
            [Decision(b, "recompute", "nowhere", sources=(a,)) for a, b in pairwise(relus[:3])],
        )  # fmt: skip
    norm = next(c for c in graph.calls if c.op == "batch_norm")
    mean = next(s.storage for s in norm.saves if graph.storages[s.storage].shape == (8,) and s.storage in norm.writes)
    plan = by_hand(graph, costs, [mean], relus[:1])
    with pytest.raises(PlanError, match=r"storage \d+ \(batch_norm, .*'recompute'.*: its op keeps it for itself"):
        gistkit.compress(model, plan)(x)
