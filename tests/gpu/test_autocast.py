"""Weights under autocast on a CUDA device: one cast a region, PyTorch's own, whoever uses the weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gistkit import functional
from tests.gpu.waiting import no_synchronisation
from tests.support.tensors import same_bits

pytestmark = pytest.mark.gpu


def test_uses_of_one_weight_are_added_as_pytorch_adds_them():
    x = torch.randn(4, 8, 9, 9, device="cuda", requires_grad=True)
    weight = torch.randn(8, 8, 1, 1, device="cuda", requires_grad=True)
    found = []
    for f in (functional, F):
        with torch.autocast("cuda", torch.bfloat16), no_synchronisation():
            y = f.conv2d(F.conv2d(f.conv2d(x, weight), weight), weight)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), (x, weight))))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
