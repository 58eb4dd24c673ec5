"""Recorder: a real step, watched without changing it."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gistkit.capture.entry import Recorder, capture
from gistkit.errors import CaptureError
from tests.support.graphs import Apply, Residual, conv, output_of  # fmt: skip


def test_a_lazy_model_is_recorded_on_its_first_real_step():
    model, x = nn.Sequential(nn.LazyLinear(8), nn.ReLU()), torch.randn(4, 8)
    with pytest.raises(CaptureError):
        capture(model, (x,))
    with Recorder(model) as recorder:
        out = model(x)
    graph = recorder.finish(out)
    assert [s.kind for s in graph.kept()] == ["input", "activation"]


def gradients(model, x, recorded):
    model.zero_grad()
    recorder = Recorder(model)
    if recorded:
        with recorder:
            out = model(x)
        graph = recorder.finish(out)
    else:
        out, graph = model(x), None
    loss = out.pow(2).mean()
    loss.backward()
    return [loss, *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())], graph


def test_a_recorded_real_step_is_the_plain_step():
    x = torch.randn(4, 8, 16, 16)
    model = nn.Sequential(Residual(), nn.MaxPool2d(2), Residual(project=True), nn.Dropout(0.0))
    twin = copy.deepcopy(model)
    plain, _ = gradients(twin, x, recorded=False)
    got, graph = gradients(model, x, recorded=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    assert graph.fingerprint == capture(model, (x,)).fingerprint
    assert graph.source == "real"


def test_real_recordings_measure_densities_by_bit_pattern():
    kept = []

    def forward(m, x):
        y = F.relu(m[0](x))
        y = torch.where(torch.arange(16) < 4, torch.tensor(-0.0), y)
        kept.append((y != 0).sum().item() + 4 * 16 * 8 * 4)
        return m[1](y).sum()

    model, x = Apply(forward, conv(), conv()), torch.randn(4, 8, 16, 16)
    with Recorder(model) as recorder:
        out = model(x)
    graph = recorder.finish(out)
    density = graph.storages[output_of(graph, "where")].density
    assert density == kept[0] / (4 * 8 * 16 * 16)
    assert [s.density for s in graph.kept() if s.kind == "input"] == [None]


def test_a_recorder_holds_nothing_back():
    model = Apply(lambda m, x: (a := m[0](x), b := F.relu(a), m[1](b))[-1], conv(), conv())
    x = torch.randn(2, 8, 8, 8)
    refs = []
    model.parts[0].register_forward_hook(lambda m, a, out: refs.append(weakref.ref(out)))
    with Recorder(model) as recorder:
        out = model(x)
        assert refs[0]() is None, "the dense convolution output is gone while recording"
    graph = recorder.finish(out)
    assert graph.kept_bytes == 2 * x.numel() * 4
    relu = weakref.ref(out.grad_fn._saved_input)
    out.sum().backward()
    del out
    gc.collect()
    assert relu() is None


def test_a_write_to_a_saved_tensor_is_pytorchs_error_still():
    model = Apply(lambda m, x: (y := F.relu(m[0](x)), z := m[1](y), y.add_(1), z)[-1], conv(), conv())
    with Recorder(model) as recorder:
        out = model(torch.randn(2, 8, 8, 8))
    recorder.finish(out)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        out.sum().backward()
