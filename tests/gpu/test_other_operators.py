"""Plans are captured with the CPU's operators: steps whose operators do otherwise on a GPU have plain's bits."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend

import gistkit
from gistkit.capture.mirrored import _has_fused_kernel
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_of_attentions_are_those_that_captures_take_for_cudas(dtype):
    """Which attentions keep their probabilities, by heads, widths and masks; torch 2.11 on an H200."""
    words = {"device": "cuda", "dtype": dtype, "requires_grad": True}
    other = []
    for heads, width, mask in itertools.product(
        (4, 2), (64, 6, 20, 24, 72, 256, 320), ("none", "causal", "bool", "grad")
    ):
        query, key = torch.randn(2, 4, 64, width, **words), torch.randn(2, heads, 64, width, **words)
        given = {"bool": torch.ones(64, 64, device="cuda") > 0, "grad": torch.zeros(64, 64, **words)}.get(mask)
        kernel = torch._fused_sdp_choice(query, key, key, given, 0.0, mask == "causal", enable_gqa=heads < 4)
        if (kernel != SDPBackend.MATH.value) != _has_fused_kernel(query, key, given, heads < 4):
            other.append((heads, width, mask, kernel))
    assert not other
