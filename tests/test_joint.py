"""Both gradients of a convolution in one call: where it is taken, and that the bits are the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.nn import conv, standin
from gistkit.nn.keep import keep_dense
from tests.nn_cases import planted, same_bits

OPTIONS = ((1, 1), (1, 1), (1, 1), 1)
LIMIT = 2 * 3 * 8 * 8 * 4


@pytest.fixture
def masks(monkeypatch):
    """The gradients asked for by each call of convolution_backward."""
    seen = []
    real = standin.Geometry.backward

    def backward(self, grad, x, weight, mask):
        seen.append(tuple(mask))
        return real(self, grad, x, weight, mask)

    monkeypatch.setattr(standin.Geometry, "backward", backward)
    return seen


def gradients(f, operands):
    y = f(*operands)
    return torch.autograd.grad(y, [t for t in operands if t.requires_grad], torch.linspace(-1, 1, y.numel()).view_as(y))


@pytest.mark.parametrize("limit", [LIMIT, LIMIT - 1])
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 1, 0), (1, 0, 1), (1, 0, 0), (0, 1, 1)])
def test_small_inputs_take_one_call_where_the_caller_allows_it(limit, allowed, needs, masks, monkeypatch):
    monkeypatch.setattr(conv, "JOINT_BYTES", {"cpu": limit})
    operands = [planted((2, 3, 8, 8)), planted((4, 3, 3, 3)), planted((4,))]
    operands = [t.requires_grad_(bool(need)) for t, need in zip(operands, needs, strict=True)]
    own = gradients(lambda x, w, b: conv.run(x, w, b, OPTIONS, keep_dense, joint=allowed), operands)
    want = gradients(lambda x, w, b: F.conv2d(x, w, b, *OPTIONS), operands)
    assert all(same_bits(a, b) for a, b in zip(own, want, strict=True))
    both = needs[0] and any(needs[1:])
    once = allowed and limit == LIMIT
    assert len(masks) == (2 if both and not once else 1)
    assert not (both and once) or masks == [tuple(map(bool, needs))]


def test_slices_are_never_joint(masks, monkeypatch):
    monkeypatch.setattr(conv, "JOINT_BYTES", {"cpu": LIMIT})
    operands = [planted((2, 3, 8, 8)).requires_grad_(), planted((4, 3, 3, 3)).requires_grad_()]
    gradients(lambda x, w: conv.run(x, w, None, OPTIONS, keep_dense, 2, joint=True), operands)
    assert masks == [(False, True, False)] * 2 + [(True, False, False)]


def test_on_the_cpu_nothing_is_joint():
    assert set(conv.JOINT_BYTES) == {"cuda"}


@pytest.mark.parametrize("given", [False, True])
def test_a_plan_of_the_callers_keeps_its_peak(given, masks, monkeypatch):
    monkeypatch.setattr(conv, "JOINT_BYTES", {"cpu": 2**30})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))
    x = torch.randn(4, 3, 12, 12)
    plan = gistkit.plan(model, x, policy="gist", loss_fn=torch.sum) if given else None
    gistkit.compress(model, plan=plan)
    model(x).sum().backward()
    masks.clear()
    model.zero_grad()
    model(x).sum().backward()
    assert (any(m[0] and m[1] for m in masks)) != given
