"""Plans are captured with the CPU's operators: steps whose operators do otherwise on a GPU have plain's bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from tests.runtime.recompute.test_other_operators import attentions, norms, steps
from tests.support.graphs import Apply


def resizes():
    """Sums of a map and a resized one, which autocast makes fp32 on a GPU."""

    def forward(m, x):
        for down, up in zip(m[0:6:2], m[1:6:2], strict=True):
            x = F.relu(up(x + F.interpolate(F.relu(down(F.max_pool2d(x, 2))), scale_factor=2)))
        return m[6](x.mean((2, 3)))

    convs = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(6)]
    return Apply(forward, *convs, nn.Linear(16, 4)), torch.randn(8, 16, 16, 16), torch.randint(4, (8,))


@pytest.mark.parametrize(("made", "narrow"), [(norms, False), (norms, True), (attentions, False), (resizes, True)])
def test_reruns_of_what_a_gpu_makes_otherwise(made, narrow):
    torch.manual_seed(0)
    model, x, y = made()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    plain = copy.deepcopy(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
        plan = gistkit.plan(model, x, y, loss_fn=F.cross_entropy, policy="checkpoint", measure=False)
        expected = steps(plain, x, y, lambda m, x, y: F.cross_entropy(m(x), y).backward())
        gistkit.compress(model, plan)
        found = steps(model, x, y, lambda m, x, y: gistkit.step(m, F.cross_entropy, x, y))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    reasons = {row.reason for row in gistkit.report(model).stats.rows}
    copied = any("as a copy that an operator makes for itself" in reason for reason in reasons)
    assert made is attentions or not copied, reasons  # the others' copies are in the plan
