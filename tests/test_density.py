"""The policy follows the measured density over the first steps, as Gist watches its first 200 minibatches."""

import torch
from torch import nn

import gistkit
from gistkit.runtime.engine import REPLAN_AFTER


def test_codec_follows_the_measured_density_up_and_down():
    model = gistkit.compress(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3)))
    x, codecs = torch.randn(4, 3, 32, 32), []
    for step in range(1, 12):
        with torch.no_grad():
            model[0].bias.fill_(8.0 if step <= 3 else -1.7)
        model(x).sum().backward()
        codecs.append(next(r.codec for r in gistkit.report(model).stats.rows if r.op == "relu" and r.plain_bytes))
    # Step 1 is planned with the assumed density, finds nothing to leave out and keeps the tensor; its count plans the
    # next.
    # Dense tensors are counted in the steps after which the plan is made anew: the change at step 4 is seen in step 5.
    assert {1, 2, 5, 10} <= REPLAN_AFTER
    assert codecs[:5] == ["dense"] * 5
    assert codecs[5:] == ["csr"] * 6


def test_what_a_step_measured_outlives_the_step_only_as_a_number():
    model = gistkit.compress(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3)))
    x = torch.randn(4, 3, 32, 32)
    with gistkit.LiveBytes() as live:
        for _ in range(3):
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
            assert live.current_bytes == 0
