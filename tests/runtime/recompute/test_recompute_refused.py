"""What cannot run anew, or does not give the same bits: kept, or refused by name."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import GistError, PlanError
from gistkit.runtime.recompute import replay as recompute_replay
from tests.support.recompute_cases import Chain, Hidden, between, block, chain, planned
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


class Counts(nn.Module):
    """A norm that updates running statistics by a call that is not batch_norm."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return F.instance_norm(x, self.mean, self.var, use_input_stats=True)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Hidden, r"recompute runs Unseen of .*anew, which is no call of a torch function .*; keep what it makes"),
        (Counts, r"recompute runs instance_norm of blocks.2 .* anew, which writes to storage \d+ \(buffer\) that out"),
    ],
)
def test_what_cannot_run_anew_is_refused_by_name(part, text):
    torch.manual_seed(0)
    model = Chain(block(3, 8), block(8, 8), part(), block(8, 8), block(8, 8))
    x = torch.randn(2, 3, 8, 8)
    plan = between(gistkit.capture(model, (x,), on_cpu=True))
    with pytest.raises(PlanError, match=text):
        gistkit.compress(model, plan)(x)


class Overwrites(nn.Module):
    """Adds to an activation that something else was made of, of which backward needs nothing."""

    def forward(self, x):
        y = x * 1.5
        z = torch.tanh(torch.cumsum(y, 1))
        return z + y.add_(1)


@pytest.mark.parametrize(
    ("part", "policy"),
    [(Hidden, "checkpoint"), (Overwrites, "checkpoint"), (Counts, "checkpoint"), (Counts, "optimal")],
)
def test_plans_run_whatever_stands_in_between(part, policy):
    """Segments that the runtime would refuse to run anew are not planned."""
    torch.manual_seed(0)
    parts = (*(block(8 if i else 3, 8) for i in range(3)), part(), *(block(8, 8) for _ in range(3)))
    model, data = Chain(*parts), batches(2, 4, 8)
    words = {"loss_fn": F.cross_entropy, "density": 1.0, "policy": policy}
    plan = gistkit.plan(model, *data[0], budget="80%" if policy == "optimal" else None, **words)
    assert policy == "optimal" or any(d.codec == "recompute" for d in plan.decisions)
    assert_same(model, gistkit.compress(copy.deepcopy(model), plan), data)
