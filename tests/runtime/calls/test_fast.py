# ruff: noqa: F811
"""The short way of covered calls: taken where nothing has changed, left where anything has; the bits are the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gistkit.runtime.calls import fast
from tests.support.fast_cases import both, compressed_and_plain, image, long_way, settle  # noqa: F401


def test_a_steady_step_goes_the_short_way(compressed_and_plain, long_way):
    settle(compressed_and_plain)
    long_way.clear()
    both(compressed_and_plain)
    assert sorted(long_way) == ["linear", "max_pool2d", "relu"], "but the ReLU whose mask the pool carries"


def test_the_report_says_the_same_of_either_way(compressed_and_plain):
    model, _ = compressed_and_plain
    rows = []
    for _ in range(4):
        model(image()).sum().backward()
        rows.append(sorted((replace(r, reason="") for r in model.forward.engine.stats.rows), key=repr))
    assert rows[0] == rows[3] and any(r.codec == "rebuild" for r in rows[3])


@pytest.mark.parametrize("turn", ["function", "written", "view", "skipped", "alpha"])
def test_a_forward_that_turns_aside(compressed_and_plain, turn):
    settle(compressed_and_plain, 3)
    for turned in (turn, turn, "", ""):
        for model in compressed_and_plain:
            model.turn = turned
        both(compressed_and_plain)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:, :1],
        lambda x: x.transpose(2, 3),
        lambda x: x.detach().requires_grad_(),
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: nn.Parameter(x),
        lambda x: None,
    ],
)
def test_a_kind_tells_tensors_apart(other):
    x = torch.randn(2, 3, 4, 4)
    kind = fast.Kind(x)
    assert kind.fits(torch.zeros(2, 3, 4, 4)) and not kind.fits(other(x))
