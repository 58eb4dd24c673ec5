"""What the runtime remembers from call to call is made anew when what it rests on changes."""

from contextlib import contextmanager

import torch
from torch import nn

import gistkit
from gistkit.nn.standin import Geometry, StandIn
from gistkit.runtime.attach import compressed_forward

POINT = Geometry((1, 1), (0, 0), (1, 1), 1)


@contextmanager
def _without_onednn():
    """``torch.backends.mkldnn.flags`` warns of TF32 on every entry."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _operands(channels=4, size=8, groups=1):
    x = torch.randn(16, channels, size, size)
    return x, torch.randn(4, channels // groups, 1, 1, requires_grad=True)


def test_a_stand_in_asks_again_under_other_settings():
    x, weight = _operands(groups=2)
    point = POINT._replace(groups=2)
    stand_in = StandIn.of(x, weight, point)
    first = stand_in.tensor(weight, point)
    assert stand_in.tensor(weight, point) is first
    with _without_onednn():
        other = stand_in.tensor(weight, point)
        assert other is not first and other.untyped_storage().nbytes() > 0  # a copy of it is harmless
    assert stand_in.tensor(weight, point).shape == x.shape


def test_a_parameter_that_is_unfrozen_is_planned_for():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3)).train()
    for p in model[:3].parameters():
        p.requires_grad_(False)
    x = torch.randn(4, 3, 16, 16)
    gistkit.compress(model)
    for _ in range(3):
        model(x).sum().backward()
    plain_bytes = gistkit.report(model).stats.plain_bytes
    model.requires_grad_(True)
    for _ in range(3):
        model(x).sum().backward()
    report = gistkit.report(model)
    assert report.stats.plain_bytes > plain_bytes and report.ratio > 1.2


def test_stats_are_those_of_the_forwards_end():
    model = gistkit.compress(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).train())
    y = model(torch.randn(4, 3, 16, 16))
    held = compressed_forward(model)
    y.sum().backward()
    del y
    first = held.engine.stats
    assert first is held.engine.stats and first.kept_bytes > 0
    assert {r.module for r in first.rows if r.op} >= {"1"}
