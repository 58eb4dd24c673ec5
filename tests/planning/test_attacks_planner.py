"""Plans that a damaged or edited file gives: refused by what is wrong with them, never carried out otherwise."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import PlanError
from tests.runtime.test_attacks import images


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 256, 5))


@cache
def plan(**words):
    return gistkit.plan(net(), images(), torch.arange(4), loss_fn=F.cross_entropy, policy="gist", **words)


def step(made):
    return gistkit.step(gistkit.compress(net(), made), F.cross_entropy, images(), torch.arange(4))


def with_decision(of, /, **changes):
    """The plan with other words in its first decision of that codec."""
    at = next(i for i, d in enumerate(plan().decisions) if d.codec == of)
    changed = replace(plan().decisions[at], **changes)
    return replace(plan(), decisions=(*plan().decisions[:at], changed, *plan().decisions[at + 1 :]))


def with_choice(**changes):
    return replace(plan(), choices=(replace(plan().choices[0], **changes), *plan().choices[1:]))


def test_the_plan_itself_is_carried_out():
    assert {"rebuild", "argmax4"} <= {d.codec for d in plan().decisions} and plan().choices
    assert torch.equal(step(plan()), step(gistkit.Plan.from_json(plan().to_json())))
    step(plan(lossy="fp8"))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: with_decision("argmax4", codec="argmax5"), r"codec must be one of dense, .*, got 'argmax5'"),
        (lambda: with_decision("argmax4", place="moon"), r"place must be one of device, host, nowhere, got 'moon'"),
        (lambda: with_decision("argmax4", storage=-1), r"must be one for each storage, got no storage"),
        (lambda: with_decision("argmax4", storage=10**6), r"decisions must be about storages 0 to \d+, got one about"),
        (lambda: with_decision("rebuild", recipe=("x",)), r"recipe must be a \(\"relu\", ...\) of terms .*got"),
        (lambda: with_decision("rebuild", recipe=("relu", ("add", ("bn", 1)))), r"recipe must be a"),
        (lambda: replace(plan(), decisions=plan().decisions * 2), r"one for each storage, got a second one"),
        (lambda: replace(plan(), sub_batches=-2), r"sub_batches must be at least 1, got -2"),
        (lambda: with_choice(covered=99), r"covered call 99 must be for a call that exists, got"),
        (lambda: with_choice(op="linear"), r"must be for \w+, got linear"),
        (
            lambda: replace(plan(lossy="fp8"), fidelity="bitwise"),
            r"fidelity must be 'lossy', as it rounds to fp8, got 'bitwise'",
        ),
    ],
)
def test_damaged_plans_are_refused(made, text):
    with pytest.raises(PlanError, match=rf"compress: plan is damaged: .*{text}.*; give the whole file as to_json"):
        step(made())
