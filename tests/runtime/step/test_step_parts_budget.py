"""step in sub-batches under a budget: what is asked beforehand stays within it, and operators prove rows apart."""

import copy
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.step.deterministic_forward import GivenStatistics
from gistkit.runtime.step.norm_arithmetic import Cut, check_parts
from gistkit.runtime.step.row_independence import dry_run
from tests.support.models import Call
from tests.support.step_parts_cases import (
    APART,
    CLASSES,
    COUPLED,
    ROWS,
    Net,
    contrastive,
    cross_entropy_sum,
    images,
    weighted,
)

REMEDIES = (
    'pass sub_batches=1, or plan without sub-batches (fidelity="bitwise"), or take the parts for what they give with '
    "check=False"
)


LAST = torch.tensor([0, 1, 2, 3, 4, 0, -100, 2])


def planned(model, budget, x, t, loss_fn=F.cross_entropy, **words):
    return gistkit.plan(model, x, t, loss_fn=loss_fn, fidelity="reassociated", budget=budget, **words)


def least(model, x, t, loss_fn=F.cross_entropy):
    with pytest.raises(gistkit.BudgetError) as raised:
        planned(model, 1, x, t, loss_fn)
    return raised.value.least_bytes["reassociated"]


def peak(model, plan, x, t, **options):
    """The peak of the first step under the plan, which it was asked before whether it adds up."""
    twin = gistkit.compress(copy.deepcopy(model), plan)
    with LiveBytes(timeline=False) as live, warnings.catch_warnings():
        warnings.simplefilter("ignore", gistkit.BudgetWarning)
        live.track(twin, x, t)
        gistkit.step(twin, options.pop("loss_fn", F.cross_entropy), x, t, **options)
    return live.peak_bytes


class Deep(nn.Sequential):
    def __init__(self, middle=None):
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *([] if middle is None else [middle]),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
        )  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_asking_stays_within_the_budget(share):
    model, (x, t) = Deep(), images()
    low = least(model, x, t)
    plan = planned(model, int(low * (1 + share)), x, t)
    assert peak(model, plan, x, t) <= plan.budget_bytes
    assert peak(model, plan, x, t, sub_batches=8) <= plan.budget_bytes


def test_nothing_of_it_is_left_when_the_parts_begin():
    model, (x, t) = Deep(nn.BatchNorm2d(8).eval()), images()
    nn.init.zeros_(model[-1].weight)
    twin = gistkit.compress(model, planned(model, "90%", x, t))
    held = []

    def loss_fn(out, t):
        held.append(live.current_bytes)
        return F.cross_entropy(out, t)

    gc.collect()
    gc.disable()
    try:
        with LiveBytes(timeline=False) as live:
            live.track(twin, x, t)
            before = live.current_bytes
            check_parts(twin, loss_fn, ((x,), {}), t, Cut((0, 4, 8), "mean"))
            assert max(held) > before == live.current_bytes
    finally:
        gc.enable()


def test_losses_are_looked_at_without_room_for_a_forward():
    model, (x, t) = Deep(), images()
    plan = planned(model, least(model, x, t), x, t)
    assert plan.sub_batches > 1
    for loss_fn in (cross_entropy_sum, weighted, contrastive):
        with pytest.raises(ValueError, match=r"step: loss_fn must return the mean over its rows"):
            peak(model, plan, x, t, loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"step: loss_fn must return the mean over its rows"):
        peak(model, plan, x, LAST)


@pytest.mark.parametrize(("name", "what"), [("the next row", "roll"), ("number", "the number of rows")])
def test_no_room_to_find_out_is_an_error_where_operators_may_couple_rows(name, what):
    between = Call(COUPLED[name])
    wide, head = nn.Conv2d(16, 8, 3, padding=1), (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), between, wide, nn.ReLU(), *head)
    x, t = images()
    plan = planned(model, least(model, x, t), x, t)
    assert plan.sub_batches > 1
    with pytest.raises(ValueError) as raised:
        peak(model, plan, x, t)
    text = str(raised.value)
    assert text.startswith(
        f"step: whether {what} makes rows depend on each other must be found out before they are taken in sub-batches, "
        "and the plan's budget has no room for the "
    )
    assert text.endswith(f" bytes; {REMEDIES}")
    assert peak(model, plan, x, t, check=False) <= plan.budget_bytes


PROVEN = ("nothing", "instance norm", "group norm", "prelu", "given statistics", "spectral")


@pytest.mark.parametrize("name", [*APART, *COUPLED])
def test_operators_prove_rows_apart_only_where_they_are(name):
    model, (x, _) = Net((APART | COUPLED)[name]), images(4)
    found = [dry_run(model, ((x[:n],), {}), n, GivenStatistics(False)) for n in (2, 4)]
    proven = not any(dry.unproven for dry in found) and found[0].numbers == found[1].numbers
    assert proven == (name in PROVEN)


def test_whole_networks_are_proven():
    for make in (gistkit.zoo.vgg16, gistkit.zoo.resnet18, gistkit.zoo.squeezenet):
        model = make(num_classes=10, image_size=32).eval()
        assert not dry_run(model, ((torch.randn(2, 3, 32, 32),), {}), 2, GivenStatistics(False)).unproven


def test_more_rows_than_the_budget_has_room_for():
    model, (x, t) = Deep(), images()
    plan = planned(model, least(model, x, t), x, t)
    each = x[0].numel() * 4 + 8
    room = (plan.budget_bytes - plan.peak_bytes) // each
    more = images(ROWS + room + 1)
    with pytest.raises(gistkit.PlanMismatchError) as raised:
        peak(model, plan, *more)
    assert str(raised.value) == (
        f"the step differs from its plan: expected a batch of at most {ROWS + room} rows, which the plan's budget has "
        f"room for, got one of {ROWS + room + 1} rows of {each} bytes; plan for a batch of {ROWS + room + 1}, or call "
        f"gistkit.step with {ROWS} rows at a time"
    )
    wider = planned(model, plan.budget_bytes + 4 * each, x, t)
    assert peak(model, wider, *images(ROWS + (wider.budget_bytes - wider.peak_bytes) // each)) <= wider.budget_bytes


def test_gradients_that_are_there_take_their_bytes():
    model, (x, t) = Deep(), images()
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    for fidelity in ("bitwise", "reassociated"):
        words = {"loss_fn": F.cross_entropy, "fidelity": fidelity}
        with pytest.raises(gistkit.BudgetError) as raised:
            gistkit.plan(model, x, t, budget=1, **words)
        budget = raised.value.least_bytes[fidelity]
        reserve = gradient_bytes if fidelity == "bitwise" else 0
        plan = gistkit.plan(model, x, t, budget=budget + reserve, reserved_bytes=reserve, **words)
        assert (plan.sub_batches > 1) == (fidelity == "reassociated")
        twin = gistkit.compress(copy.deepcopy(model), plan)
        for p in twin.parameters():
            p.grad = torch.zeros_like(p)
        with LiveBytes(timeline=False) as live, warnings.catch_warnings():
            warnings.simplefilter("ignore", gistkit.BudgetWarning)
            live.track(twin, x, t, *(p.grad for p in twin.parameters()))
            gistkit.step(twin, F.cross_entropy, x, t)
        assert live.peak_bytes <= plan.budget_bytes
