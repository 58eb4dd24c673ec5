"""The runtime's memory: what lives how long, kept and peak bytes against eager; nothing is left behind."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit import zoo
from gistkit.capture.nodes import reachable
from gistkit.runtime import engine
from gistkit.runtime.forward import state
from gistkit.runtime.live import LiveBytes
from tests.support.graphs import Residual
from tests.support.nn_cases import same_bits
from tests.support.step_cases import run
from tests.support.training import batches

WIDTH = 8


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


def measure(model, x, t):
    """(bytes kept after forward, peak bytes) of a second step; gradients and what was there before left out."""
    F.cross_entropy(model(x), t).backward()  # densities are learnt, gradient buffers exist
    with LiveBytes(timeline=False) as live:
        loss = F.cross_entropy(model(x), t)
        kept = live.current_bytes
        loss.backward()
    return kept, live.peak_bytes


@pytest.mark.parametrize(
    ("name", "size", "lossy", "kept_least", "peak_least"),
    [("vgg16", 64, None, 3.0, 1.7), ("resnet50", 32, "fp8s", 5.0, 1.3)],
)
def test_kept_and_peak_bytes_against_eager(name, size, lossy, kept_least, peak_least):
    plain = zoo.MODELS[name](num_classes=10, image_size=size)
    twin = gistkit.compress(copy.deepcopy(plain), lossy=lossy)
    x, t = torch.randn(4, 3, size, size), torch.randint(10, (4,))
    (kept, peak), (kept_now, peak_now) = measure(plain, x, t), measure(twin, x, t)
    # The report counts the batch, which was there before; it misses the loss's own few tensors (log-softmax, logits).
    assert 0 <= kept_now + x.nbytes - gistkit.report(twin).stats.kept_bytes <= 4 * 4 * 10 * 4 + 1024
    assert kept >= kept_least * kept_now and peak >= peak_least * peak_now


def network():
    torch.manual_seed(0)
    stem = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(
        *stem, Residual(WIDTH), nn.Dropout(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(WIDTH * 16, 10)
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def images():
    return torch.randn(8, 3, 16, 16)


def compressed(how):
    model = network()
    if how is None:
        return gistkit.compress(model)
    plain = gistkit.plan(model, images(), policy="plain")
    budget = round(0.9 * plain.peak_bytes) if how == "checkpoint within a budget" else None
    plan = gistkit.plan(model, images(), policy=how.split()[0], budget=budget)
    assert "recompute" in {d.codec for d in plan.decisions}
    return gistkit.compress(model, plan)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("how", [None, "checkpoint", "checkpoint within a budget"])
def test_steps_leave_nothing_to_the_collector(monkeypatch, no_collector, how):
    model, regions = compressed(how), []

    class Watched(engine.ForwardState):
        def __post_init__(self):
            super().__post_init__()
            regions.append(weakref.ref(self))

    monkeypatch.setattr(engine, "ForwardState", Watched)
    with LiveBytes(timeline=False) as live:
        for _ in range(3):
            loss = model(images()).square().sum()
            loss.backward()
            del loss
            assert live.current_bytes == 0
        model(images())
        assert live.current_bytes == 0, "a forward whose result nobody wants"
    assert len(regions) == 4 and not any(ref() is not None for ref in regions)


def third_step(depth):
    """(peak, names of the convolutions' nodes, gradients) of the third step of so many blocks."""
    torch.manual_seed(0)
    stem = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU()
    model, x = (
        gistkit.compress(nn.Sequential(*stem, *(Residual(WIDTH) for _ in range(depth)))),
        torch.randn(4, 3, 24, 24),
    )
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with LiveBytes(timeline=False) as live:
            loss = model(x).square().sum()
            names = [node.name() for node in reachable([loss])]
            loss.backward()
            del loss
    return live.peak_bytes, names, [p.grad for p in model.parameters()]


def test_pytorchs_nodes_raise_no_peak_where_there_is_room(monkeypatch):
    """Convolutions that take both gradients at once where later calls have let go of as much."""
    monkeypatch.setattr(state, "JOINT_BYTES", 0)
    joint, fewer, grads = third_step(depth=6)
    monkeypatch.setattr(state.ForwardState, "has_room", lambda *_: False)
    apart, own, wanted = third_step(depth=6)
    assert own.count("_Conv2dBackward") == 12 and 0 < fewer.count("_Conv2dBackward") <= 6
    assert all(map(same_bits, grads, wanted)) and joint <= apart
