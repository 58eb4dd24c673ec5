"""What a user may give or edit that makes no sense, and what was once answered badly: each is told by name."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.capture.entry import capture
from gistkit.errors import PlanError
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.refusal import remedy
from tests.runtime.test_attacks import images

LEAST = {"bitwise": 300, "reassociated": 200, "lossy": 100}


def net(norm=None):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), norm or nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 1024, 5))


@cache
def plan(**words):
    return gistkit.plan(net(), images(), torch.arange(4), loss_fn=F.cross_entropy, **words)


def step(model):
    return gistkit.step(model, F.cross_entropy, images(), torch.arange(4))


def test_a_refusal_names_the_bytes_of_the_class_that_was_asked_for():
    texts = {"bitwise": "", "reassociated": ", for reassociated moves,", "lossy": ", for lossy moves,"}
    for asked, text in texts.items():
        assert f"raise the budget to {LEAST[asked]} bytes{text} or take" in remedy(50, LEAST, asked, "fp8")


@pytest.mark.parametrize("call", [gistkit.plan, gistkit.profile])
def test_a_batch_without_rows_is_refused(call):
    text = r"(plan|profile): batch must hold at least one row, got a tensor of shape \(0, 3, 32, 32\); pass a batch"
    with pytest.raises(ValueError, match=text):
        call(net(), images()[:0], torch.arange(0), loss_fn=F.cross_entropy)


def test_a_plan_that_rounds_says_so():
    graph = capture(net(), (images(),))
    assert gist(graph, lossy="fp8").fidelity == "lossy"
    assert gist(graph).fidelity == "bitwise"
    rounded = gistkit.plan(net(), images(), torch.arange(4), loss_fn=F.cross_entropy, policy="gist", lossy="fp8")
    step(gistkit.compress(net(), rounded))
    with pytest.raises(
        PlanError, match=r"plan is damaged: fidelity must be 'lossy', as it rounds to fp8, got 'bitwise'"
    ):
        gistkit.compress(net(), replace(rounded, fidelity="bitwise"))
