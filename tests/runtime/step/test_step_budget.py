"""step in sub-batches under a budget: what it checks stays within it, or is refused with the budget to plan with."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.step.row_independence import REMEDIES
from tests.support.peaks import least_bytes
from tests.support.step_cases import batch

ROWS = 8


def own_loss(out, t):
    return F.cross_entropy(out, t)


def planned(model, budget, x, t, **words):
    return gistkit.plan(model, x, t, loss_fn=F.cross_entropy, fidelity="reassociated", budget=budget, **words)


def least(model, x, t, **words):
    return least_bytes(model, x, t, **{"loss_fn": F.cross_entropy, "fidelity": "reassociated", **words})


def peak(model, plan, x, t, loss_fn=F.cross_entropy, **options):
    """The peak of the first step under the plan, with all that it checks."""
    twin = gistkit.compress(copy.deepcopy(model), plan)
    with LiveBytes(timeline=False) as live, warnings.catch_warnings():
        warnings.simplefilter("ignore", gistkit.BudgetWarning)
        live.track(twin, x, t)
        gistkit.step(twin, loss_fn, x, t, **options)
    return live.peak_bytes


def deep():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("loss_fn", [F.cross_entropy, own_loss])
def test_checks_stay_within_the_budget(share, loss_fn):
    model, (x, t) = deep(), batch(ROWS)
    plan = planned(model, int(least(model, x, t) * (1 + share)), x, t)
    assert plan.sub_batches > 1
    assert peak(model, plan, x, t, loss_fn) <= plan.budget_bytes
    assert peak(model, plan, x, t, loss_fn, sub_batches=8) <= plan.budget_bytes


def per_pixel():
    """Results are most of what this network holds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 32, 1)), torch.randint(32, (8, 8, 8))


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, own_loss])
def test_no_room_to_check_is_an_error_that_names_the_budget(loss_fn):
    (model, t), (x, _) = per_pixel(), batch(ROWS)
    budget, refusals = least(model, x, t), []
    for _ in range(9):
        plan = planned(model, budget, x, t)
        assert peak(model, plan, x, t, loss_fn, verify=False) <= budget
        try:
            assert peak(model, plan, x, t, loss_fn) <= budget
            break
        except ValueError as error:
            refusals.append(str(error))
            budget += int(refusals[-1].split("plan with a budget of ")[1].split(" ")[0])
    rows, loss = "whether rows depend on each other could not be found out", "loss_fn could not be compared with"
    assert refusals[0].startswith(f"step: {rows}: it takes ") and refusals[0].endswith(f" bytes more; {REMEDIES}")
    assert refusals[-1].startswith(f"step: {rows if loss_fn is F.cross_entropy else loss}") and plan.sub_batches > 1


def test_more_rows_than_the_budget_has_room_for():
    model, (x, t) = deep(), batch(ROWS)
    plan = planned(model, least(model, x, t), x, t)
    each = x[0].numel() * 4 + 8
    room = (plan.budget_bytes - plan.peak_bytes) // each
    more = batch(ROWS + room + 1)
    with pytest.raises(gistkit.PlanMismatchError) as raised:
        peak(model, plan, *more)
    assert str(raised.value) == (
        f"the step differs from its plan: expected a batch of at most {ROWS + room} rows, which the plan's budget has "
        f"room for, got one of {ROWS + room + 1} rows of {each} bytes; plan for a batch of {ROWS + room + 1}, or call "
        f"gistkit.step with {ROWS} rows at a time"
    )
    wider = planned(model, plan.budget_bytes + 4 * each, x, t)
    assert peak(model, wider, *batch(ROWS + (wider.budget_bytes - wider.peak_bytes) // each)) <= wider.budget_bytes


def test_gradients_that_are_there_take_their_bytes():
    model, (x, t) = deep(), batch(ROWS)
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    for fidelity in ("bitwise", "reassociated"):
        words = {"loss_fn": F.cross_entropy, "fidelity": fidelity}
        budget = least_bytes(model, x, t, **words)
        reserve = gradient_bytes if fidelity == "bitwise" else 0
        plan = gistkit.plan(model, x, t, budget=budget + reserve, reserved_bytes=reserve, **words)
        assert (plan.sub_batches > 1) == (fidelity == "reassociated")
        twin = gistkit.compress(copy.deepcopy(model), plan)
        for p in twin.parameters():
            p.grad = torch.zeros_like(p)
        with LiveBytes(timeline=False) as live, warnings.catch_warnings():
            warnings.simplefilter("ignore", gistkit.BudgetWarning)
            live.track(twin, x, t, *(p.grad for p in twin.parameters()))
            gistkit.step(twin, F.cross_entropy, x, t, verify=False)  # which needs more
        assert live.peak_bytes <= plan.budget_bytes
