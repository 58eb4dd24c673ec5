"""Capture leaves the model, its user and the process as they were, or says that it cannot."""

import gc
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gistkit.capture import uncollected
from gistkit.capture.entry import capture
from gistkit.errors import CaptureError
from tests.support.graphs import Apply, captured, conv, fake_batch, ops
from tests.support.training import unchanged


@pytest.mark.parametrize("fake", [True, False])
def test_copied_weights_do_not_stay_in_the_autocast_cache(fake):
    """Casts of fake weights may until the context is left: they are no memory. Of real ones none enters."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def left():
        found = [t for t in gc.get_objects() if type(t) in (FakeTensor, torch.Tensor) and t.shape == (64, 64)]
        return [t for t in found if type(t) is FakeTensor or t.dtype == torch.bfloat16]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(1, 64)
        before = model[0](x).grad_fn
        capture(model, (x,), fake=fake)
        gc.collect()
        assert fake or not left()
        assert torch.is_autocast_cache_enabled()
        bias_cast = model[0](x).grad_fn.next_functions[0][0]
        assert bias_cast is before.next_functions[0][0]  # the caller's own casts are still there
    del before, bias_cast
    gc.collect()
    assert not left()


def test_the_model_and_the_random_states_stay_untouched():
    class Random(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.Dropout()), 0

        def forward(self, x):
            self.calls += 1
            noise = random.random() + np.random.rand() + torch.rand(1)
            return self.body(x) * noise + torch.randn_like(x)

    model = Random()
    with unchanged(model):
        for how in ({}, {"fake": False}, {"backward": True}):
            capture(model, (torch.randn(2, 8, 4, 4, generator=torch.Generator()),), **how)
    assert model.calls == 0


class Criterion(nn.Module):
    """A loss with a weight of its own and a penalty on those of the model, which it knows, a buffer among them."""

    def __init__(self, model):
        super().__init__()
        self.scale, self.of = nn.Parameter(torch.ones(8)), [model]

    def forward(self, out):
        decay = sum(t.square().sum() for t in (*self.of[0].parameters(), self.of[0][1].running_var))
        return (out * self.scale[:, None, None]).mean() + decay


def test_a_loss_that_knows_the_model_leaves_every_gradient_as_it_is():
    model = nn.Sequential(conv(), nn.BatchNorm2d(8))
    criterion, x = Criterion(model), torch.randn(2, 8, 4, 4)
    leaves = [*model.parameters(), *criterion.parameters()]
    first = capture(model, (x,), backward=True, loss_fn=criterion)
    assert all(p.grad is None for p in leaves)
    criterion(model(x)).backward()
    before = [(p.grad, p.grad.clone()) for p in leaves]
    assert capture(model, (x,), backward=True, loss_fn=criterion) == first
    assert all(p.grad is grad and torch.equal(grad, g) for p, (grad, g) in zip(leaves, before, strict=True))
    kinds = Counter(b.kind for b in first.blocks)
    assert (kinds["weight"], kinds["input"]) == (4, 2), "one model, the copy; beside it the batch and the scale"
    read = {b for t in first.tasks if t.op == "loss" for b in t.reads}
    assert read.issuperset(b.id for b in first.blocks if b.kind == "weight")


def branching(m, x):
    return m[0](x) if x.sum() > 0 else x


def test_values_that_decide_the_control_flow_are_an_error_with_its_cause():
    with pytest.raises(CaptureError, match=r"the forward of Apply could not be captured on a copy of it: \w+") as info:
        captured(branching, conv())
    assert info.value.__cause__ is not None
    graph = capture(Apply(branching, conv()), (torch.ones(2, 8, 4, 4),), fake=False)
    assert ops(graph, covered_only=True) == ["conv2d"]


def test_hooks_replaced_forwards_and_uncopyable_models_are_refused():
    hooked = nn.Sequential(conv(), nn.ReLU())
    hooked[1].register_forward_hook(lambda *args: None)
    with pytest.raises(CaptureError, match="the module '1' has forward hooks, whose effects a copy cannot isolate"):
        capture(hooked, (fake_batch(2, 8, 4, 4),))
    with pytest.raises(CaptureError, match=r"the module '1' is lazy and its parameters are not there yet; run one for"):
        capture(nn.Sequential(conv(), nn.LazyConv2d(4, 1)), (fake_batch(2, 8, 4, 4),))
    patched = nn.Sequential(conv())
    patched.forward = lambda x: x
    with pytest.raises(CaptureError, match="'Sequential' has a forward replaced by a function"):
        capture(patched, (fake_batch(2, 8, 4, 4),))
    stubborn = nn.Sequential(conv())
    stubborn.lock = (i for i in range(3))
    with pytest.raises(CaptureError, match="could not be captured on a copy"):
        capture(stubborn, (fake_batch(2, 8, 4, 4),))


def test_garbage_stays_until_the_last_of_several_threads_is_done():
    first, second, third = uncollected(), uncollected(), uncollected()
    was = gc.isenabled()
    gc.enable()
    try:
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()  # a plan of another thread must not end this within a capture
        second.__exit__(None, None, None)
        assert gc.isenabled()
        gc.disable()
        with third:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable() if was else gc.disable()
