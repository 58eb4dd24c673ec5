"""The runtime's lifetimes: memory falls while backward runs, and nothing is left, after an exception neither."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime.live import LiveBytes
from tests.support.runtime_cases import run
from tests.support.training import batches


class Stash(nn.Module):
    """Fails in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.fails = False

    def forward(self, x):
        y = F.relu(self.conv(x))
        z = F.relu(self.conv(torch.sigmoid(self.conv(torch.tanh(self.conv(y[:, :3]))[:, :3]))[:, :3]))
        if self.fails:
            raise ValueError("half way")
        return F.max_pool2d(z, 2).mean((2, 3))


@pytest.mark.parametrize("policy", ["gist", "checkpoint"])
def test_an_exception_in_forward_leaves_nothing(policy):
    model, (x, t) = Stash(), batches(1, 4, 32)[0]
    plan = gistkit.plan(model, x, t, loss_fn=F.cross_entropy, policy=policy)
    assert policy == "gist" or "recompute" in {d.codec for d in plan.decisions}
    gistkit.compress(model, plan)
    run(model, (x, t))
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        model.fails = True
        with pytest.raises(ValueError, match="half way"):
            model(x)
        gc.collect()
        assert live.current_bytes == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    model.fails = False
    run(model, (x, t))


def test_memory_falls_during_backward_and_nothing_is_left():
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())))
    gistkit.compress(model)
    x = torch.randn(4, 16, 32, 32)
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        loss = model(x).sum()
        live.mark("forward end")
        kept, stages = live.current_bytes, []
        for module in model:
            if isinstance(module, nn.Conv2d):
                module.weight.register_hook(lambda g: stages.append(live.current_bytes))
        loss.backward()
        del loss
        model.zero_grad(set_to_none=True)
        gc.collect()
        assert live.current_bytes == 0
    activation = x.numel() * 4
    # A gradient, a decoded input and a dense temporary come on top of what is left; each layer frees about half of a
    # map.
    assert stages[-1] <= stages[0] - 2 * activation
    assert kept < 6 * activation


def test_dense_relu_output_goes_with_its_last_forward_reader():
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 5)
    model, seen = gistkit.compress(nn.Sequential(*layers)), []
    relu = model[1]
    x = torch.randn(4, 3, 32, 32)
    run(model, (x, torch.zeros(4, dtype=torch.long)))
    original = type(relu).forward

    def forward(self, inputs):
        y = original(self, inputs)
        seen.append(weakref.ref(y.untyped_storage()))
        return y

    relu.forward = forward.__get__(relu)
    loss = F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long))
    assert seen[0]() is None
    loss.backward()
