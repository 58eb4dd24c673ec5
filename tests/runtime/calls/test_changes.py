# ruff: noqa: F811
"""Specialised calls of a model that is changed, watched or used otherwise between steps or within one."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.runtime import engine
from tests.support.call_cases import Net, both, compressed_and_plain, image, settle, shift  # noqa: F401
from tests.support.graphs import Apply
from tests.support.nn_cases import same_bits
from tests.support.training import assert_same_gradients


def replaced(model):
    generator = torch.Generator().manual_seed(1)
    model.before = [[layer.weight for layer in (model.convs[1], *model.norms)]]  # they live on
    for layer in (model.convs[1], model.norms[1], model.norms[3]):
        layer.weight = nn.Parameter(torch.rand(layer.weight.shape, generator=generator))


def other_numbers(model):
    model.norms[0].momentum, model.norms[1].eps, model.first.momentum = 0.3, 0.1, None


def lowered(inner, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = inner(x)
    return y.float()


def without_gradient(inner, x):
    with torch.no_grad():
        return inner(x)


def wrap(layer, around):
    layer.forward = functools.partial(around, layer.forward)


def own_forwards(model):
    wrap(model.norms[1], lambda inner, x: inner(x) * 2)
    model.convs[1]._conv_forward = lambda x, w, b: F.conv2d(x, w, b, 1, 1) + 1


def own_attributes(model):
    """They stand before parameters and buffers."""
    model.norms[0].__dict__["weight"] = nn.Parameter(torch.full((8,), 0.5))
    model.convs[1].__dict__["bias"] = None
    del model.convs[3]._parameters["bias"]
    model.convs[3].bias = torch.ones(8)
    model.norms[2]._buffers.pop("running_mean")
    model.norms[2].running_mean = torch.ones(8)


def hooked(model):
    model.first.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    model.relu.register_forward_hook(lambda m, args, y: y.clone())
    model.convs[1].register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 2,))


CHANGES = {
    "frozen": lambda m: [layer.weight.requires_grad_(False) for layer in (m.convs[0], m.norms[2])],
    "replaced": replaced,
    "strided": lambda m: vars(m.convs[2]).update(stride=(1, 1), padding=(2, 2), dilation=(2, 2)),
    "other numbers": other_numbers,
    "evaluated": lambda m: m.norms[0].eval(),
    "not in place": lambda m: vars(m.relu).update(inplace=False),
    "without affine": lambda m: [setattr(m.norms[2], name, None) for name in ("weight", "bias")],
    "a part under autocast": lambda m: wrap(m.convs[2], lowered),
    "a part without gradients": lambda m: wrap(m.convs[2], without_gradient),
    "written within the forward": lambda m: m.convs[1].register_forward_hook(lambda *_: shift(m)),
    "own forwards": own_forwards,
    "own attributes": own_attributes,
    "hooked": hooked,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed(compressed_and_plain, change):
    settle(compressed_and_plain, 3)
    for model in compressed_and_plain:
        CHANGES[change](model)
    settle(compressed_and_plain, 3)


def test_another_dtype_and_back(compressed_and_plain):
    settle(compressed_and_plain, 3)
    for dtype in (torch.bfloat16, torch.float32):
        for model in compressed_and_plain:
            model.to(dtype)
        for _ in range(2):
            both(compressed_and_plain, image().to(dtype))


def test_autocast_now_and_then(compressed_and_plain):
    for enabled in (False, False, True, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            both(compressed_and_plain)


def test_evaluation_and_foreign_hooks_between_steps(compressed_and_plain):
    settle(compressed_and_plain, 3)
    outputs = [model.eval()(image()) for model in compressed_and_plain]
    assert same_bits(*outputs)
    for model in compressed_and_plain:
        model.train()
    both(compressed_and_plain)
    with torch.autograd.graph.save_on_cpu():
        both(compressed_and_plain)
    both(compressed_and_plain)


def test_foreign_hooks_within_the_forward_see_what_is_saved(compressed_and_plain):
    settle(compressed_and_plain, 3)
    seen = {model: [] for model in compressed_and_plain}
    for model in compressed_and_plain:
        for layer in (model.norms[0], model.convs[1]):
            layer.forward = lambda x, inner=layer.forward, seen=seen[model]: _watched(inner, x, seen)
    for _ in range(3):
        both(compressed_and_plain)
    ours, theirs = seen.values()
    assert ours == theirs and len(ours) > 6


def _watched(inner, x, seen):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        return inner(x)


def test_a_bias_that_is_written_between_forward_and_backward_is_an_error(compressed_and_plain):
    """Biases are read by no backward of PyTorch's, but by rebuilds."""
    settle(compressed_and_plain, 3)
    model, _ = compressed_and_plain
    loss = model(image()).sum()
    with torch.no_grad():
        for layer in model.norms:
            layer.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_threads_side_by_side(compressed_and_plain):
    model, plain = compressed_and_plain
    settle(compressed_and_plain, 3)
    want = [torch.autograd.grad(plain(image(batch)).sum(), plain.convs[1].weight)[0] for batch in (2, 4)]

    def work(batch):
        return [torch.autograd.grad(model(image(batch)).sum(), model.convs[1].weight)[0] for _ in range(5)]

    with ThreadPoolExecutor(2) as threads:
        for expected, found in zip(want, threads.map(work, (2, 4)), strict=True):
            assert all(same_bits(got, expected) for got in found)


def test_a_stash_that_is_seen_otherwise(compressed_and_plain):
    """A convolution of a ReLU's output with height and width exchanged: a view of the same storage."""
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    convs = (nn.Conv2d(8, 8, 3, bias=False) for _ in range(2))
    plain = Apply(lambda m, x: (m[1](y := m[0](x)) + m[2](y.transpose(2, 3))).mean((2, 3)), first, *convs)
    settle((gistkit.compress(copy.deepcopy(plain)), plain), 9)


def test_a_graph_that_is_retained(compressed_and_plain):
    settle(compressed_and_plain, 3)
    results = []
    for model in compressed_and_plain:
        loss = model(image()).sum()
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        results.append([*first, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss = compressed_and_plain[0](image()).sum()
        loss.backward()
        loss.backward()


class Unrolled(nn.Module):
    """Calls its layers as often as ``times`` says, as a recurrent model does over clips of several lengths."""

    def __init__(self):
        super().__init__()
        self.stem, self.cell, self.times = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), 2

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.times):
            x = self.cell(torch.relu(x))
        return x.sum()


def test_a_model_that_changes_in_each_step_is_captured_some_times_only(monkeypatch):
    captured, capture = [], engine.capture
    monkeypatch.setattr(engine, "capture", lambda *args, **kwargs: captured.append(1) or capture(*args, **kwargs))
    lengths = torch.Generator().manual_seed(0)
    each = torch.randint(1, 5, (60,), generator=lengths).tolist()

    def run(model, step):
        model.times = each[step]
        return model(image())

    ours = assert_same_gradients(Unrolled(), run, steps=60)
    assert len(captured) <= 12
    assert "keep leaving their plan" in " ".join(gistkit.report(ours).notes)
