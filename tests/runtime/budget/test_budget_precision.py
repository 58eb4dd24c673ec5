"""Budgets kept to the byte in bf16, fp16, double and under autocast."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.support.graphs import Apply
from tests.support.models import Call, Checkpointed
from tests.support.nn_cases import same_bits
from tests.support.peaks import least_plan, peaks_of, peaks_of_steps, unchecked_peak


def residual(m, x):
    """relu(BN(x) + BN(y)) and relu(BN(x) + x), whose outputs two convolutions read."""
    x = torch.relu(m[4](m[0](x)))
    y = torch.relu(m[5](m[1](x)) + x)
    z = torch.relu(m[6](m[2](y)) + m[7](y))
    return m[3](z).sum()


def test_rebuilds_in_low_precision_keep_the_plan_to_the_byte():
    """PyTorch's operators make fp32 copies there: of blocks of a tensor, which the plan counts."""
    convs, norms = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8, 8)), [nn.BatchNorm2d(8) for _ in range(4)]
    model, x = Apply(residual, *convs, *norms).bfloat16(), torch.randn(4, 3, 20, 20).bfloat16()
    for norm in norms:
        norm.float()
    gist = gistkit.plan(model, x, policy="gist")
    assert any(d.codec == "rebuild" for d in gist.decisions), [d.codec for d in gist.decisions]
    for plan in (least_plan(model, x), gist):
        peaks = peaks_of(model, plan, x)
        assert 0.98 * plan.peak_bytes <= peaks[1] <= max(peaks) <= plan.peak_bytes, plan.policy


def block(*layers):
    return lambda: nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


MIXED = {
    "conv": block(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(768, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
    ),
    "checkpoint": block(nn.Conv2d(3, 8, 3), nn.ReLU(), Checkpointed(nn.Conv2d(8, 8, 3), nn.ReLU())),
}


def stepped(model, x, y, context, how):
    """Peaks of two steps in an autocast context."""

    def step():
        with context():
            if how == "step":
                return gistkit.step(model, F.cross_entropy, x, y, verify=False)  # some have no room for it
            out = model(x)
            loss = F.cross_entropy(out, y)
        return loss.backward()

    return peaks_of_steps(model, step, x, y)


@pytest.mark.parametrize(
    ("name", "how", "dtype"),
    [
        *((name, "loop", torch.bfloat16) for name in ("conv", "linear", "checkpoint")),
        ("linear", "step", torch.bfloat16),
        ("conv", "loop", torch.float16),
    ],
)
def test_budgets_count_the_casts_that_autocast_holds(name, how, dtype):
    """In a loop that leaves the context before backward, and in gistkit.step."""
    model, x, y = MIXED[name](), torch.randn(4, 3, 16, 16), torch.arange(4)
    context = functools.partial(torch.autocast, "cpu", dtype=dtype)
    ask = {"loss_fn": F.cross_entropy, "density": 1.0}
    with context():
        plain = gistkit.plan(model, x, y, policy="plain", **ask)
        plan = least_plan(model, x, y, **ask)
    unheld_bytes = 5 * 4 * 2 if how == "step" else 0  # gistkit.step does not hold the model's output
    assert stepped(copy.deepcopy(model), x, y, context, how) == [plain.peak_bytes - unheld_bytes] * 2
    peaks = stepped(gistkit.compress(copy.deepcopy(model), plan), x, y, context, how)
    assert max(peaks) <= plan.peak_bytes
    assert peaks[1] >= 0.99 * plan.peak_bytes


def test_sub_batches_under_autocast_are_alike():
    """No cast that a checkpoint makes in one part's backward is left to the next part's forward."""
    model, x, y = MIXED["checkpoint"](), torch.randn(4, 3, 16, 16), torch.arange(4)
    context = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    with context():
        plan = least_plan(model, x, y, loss_fn=F.cross_entropy, density=1.0, fidelity="reassociated")
    peaks = stepped(gistkit.compress(model, plan), x, y, context, "step")
    assert plan.sub_batches == 4
    assert 0.99 * plan.peak_bytes <= peaks[1] <= max(peaks) <= plan.peak_bytes


DOUBLE = {
    "grouped": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 3, groups=2)
    ),
    "pools": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GELU(), nn.AvgPool2d(2), nn.MaxPool2d(3, 2), nn.Conv2d(8, 4, 1)
    ),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_budgets_in_double_count_the_operators_that_run(name):
    """PyTorch's own: a convolution's or linear's backward makes both gradients at once. Of what only pools save their
    shape alone is kept all the same."""
    model = nn.Sequential(DOUBLE[name](), Call(lambda y: y.square().mean())).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    graph = gistkit.capture(model, (x,), backward=True)
    assert not any(t.part for t in graph.tasks)
    plain = gistkit.plan(model, x, policy="plain")
    assert peaks_of(model, plain, x) == [plain.peak_bytes] * 2
    plan = least_plan(model, x)
    peaks = peaks_of(model, plan, x)
    assert max(peaks) <= plan.peak_bytes <= plan.budget_bytes
    assert peaks[1] == unchecked_peak(plan, model, x)
    twins = [copy.deepcopy(model), gistkit.compress(copy.deepcopy(model), plan)]
    for twin in twins:
        twin(x).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(*(t.parameters() for t in twins), strict=True))
