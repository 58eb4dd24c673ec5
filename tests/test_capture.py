"""Capture: what one forward calls and keeps, on a fake copy and on a real step."""

import copy
import gc
import random
import time
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gistkit import zoo
from gistkit.errors import CaptureError
from gistkit.graph import calls
from gistkit.graph.capture import Recorder, capture
from tests.graphs import (
    Apply,
    Double,
    Functional,
    Residual,
    captured,
    conv,
    fake_batch,
    ops,
    output_of,
    saves_of,
    the,
)  # fmt: skip


def test_a_chain_call_by_call():
    model = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 4))
    graph = capture(model, (fake_batch(4, 8, 16, 16),))
    assert ops(graph) == ["conv2d", "relu", "max_pool2d", "flatten", "linear"]
    assert [c.covered for c in graph.calls] == [0, 1, 2, -1, 3]
    assert [c.module for c in graph.calls] == ["0", "1", "2", "3", "4"]
    relu, pool = output_of(graph, "relu"), output_of(graph, "max_pool2d")
    assert saves_of(graph, relu) == [("relu", "result", True), ("max_pool2d", "self", False)]
    assert saves_of(graph, pool) == [("linear", "mat1", True)]
    assert [c.op for c in graph.readers(pool)] == ["flatten", "linear"]
    assert the(graph, "max_pool2d").options["kernel_size"] == [2, 2]
    kept = {s.id: s for s in graph.kept()}
    assert kept[relu].nbytes == 4 * 8 * 16 * 16 * 4 and kept[relu].kind == "activation"
    input_bytes, relu_bytes, pool_bytes, index_bytes = 32768, 32768, 8192, 16384
    assert graph.kept_bytes == input_bytes + relu_bytes + pool_bytes + index_bytes
    assert [s.id for s in graph.storages if s.escapes] == [output_of(graph, "linear")]


def test_parameters_and_buffers_are_left_out():
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[4].weight = shared.weight
    graph = capture(model, (fake_batch(16, 64),))
    weights = [s for s in graph.storages if s.kind == "parameter"]
    assert len(weights) == 5, "a tied weight is one storage"
    assert [s.kind for s in graph.storages].count("buffer") == 3
    assert all(s.kind in ("input", "activation") for s in graph.kept())
    saved_kinds = {graph.storages[s.storage].kind for c in graph.calls for s in c.saves}
    assert saved_kinds == {"input", "activation", "parameter", "buffer"}


def test_autocast_copies_of_weights_are_parameters():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, (fake_batch(64, 64),))
    kept = graph.kept()
    assert {s.dtype for s in kept} == {"bfloat16"}
    assert [s.nbytes for s in kept] == [64 * 64 * 2] * 2, "the cast input, the ReLU's output; no weights"


def test_fake_weights_do_not_stay_in_the_autocast_cache():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture(model, (torch.randn(64, 64),))
        gc.collect()
        assert not [t for t in gc.get_objects() if type(t) is FakeTensor and t.shape == (64, 64)]
        assert torch.is_autocast_cache_enabled()


def test_in_place_calls_share_a_storage_and_make_new_values():
    graph = captured(lambda m, x: m[1](m[0](x)), conv(), Residual())
    add, last = the(graph, "add", -1), the(graph, "relu", 1)
    norm = the(graph, "batch_norm", 1)
    assert add.inplace and last.inplace and not norm.inplace
    storages = {graph.values[i].storage for i in (*norm.results, *add.results, *last.results)}
    assert len(storages) == 1
    versions = [graph.values[c.results[0]].version for c in (norm, add, last)]
    assert versions == [0, 1, 2]
    assert add.operands == (norm.results[0], the(graph, "conv2d").results[0])
    storage = storages.pop()
    (call, save), *rest = graph.savers(storage)
    assert (call.op, save.field, rest) == ("relu", "result", []) and graph.values[save.value].version == 2
    assert [c.op for c in graph.writers(storage)] == ["batch_norm", "add", "relu"]


def test_one_module_called_several_times_functions_methods_and_nested_outputs():
    graph = capture(Functional(), (fake_batch(4, 8, 16, 16),))
    assert ops(graph, covered_only=True) == [
        "conv2d", "relu", "conv2d", "relu", "add", "relu", "relu", "conv2d", "dropout", "relu",
        "max_pool2d", "max_pool2d",
    ]  # fmt: skip
    assert [c.module for c in graph.calls if c.op == "relu"] == ["relu", "relu", "", "", "relu"]
    outputs = {output_of(graph, "relu", 4), output_of(graph, "max_pool2d", 0), output_of(graph, "max_pool2d", 1)}
    assert {s.id for s in graph.storages if s.escapes} == outputs


class Covered(TorchFunctionMode):
    """The runtime's side of the numbering rule."""

    def __init__(self, pack):
        super().__init__()
        self.pack, self.ops = pack, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        op = calls.COVERED.get(func)
        if op is not None and calls.is_counted(calls.bind(op, func, args, kwargs)) and calls.region_is_open(self.pack):
            self.ops.append(op)
        return func(*args, **(kwargs or {}))


def with_checkpoints(reentrant):
    def forward(m, x):
        y = m[0](x)
        y = checkpoint(lambda t: F.relu(m[1](F.relu(t))), y, use_reentrant=reentrant)
        return m[2](F.dropout(y))

    return Apply(forward, conv(), conv(), conv())


MODELS = {
    "functional": (Functional, (2, 8, 16, 16)),
    "residual": (lambda: nn.Sequential(Residual(), Residual(project=True)), (2, 8, 16, 16)),
    "checkpoint": (lambda: with_checkpoints(False), (2, 8, 16, 16)),
    "reentrant": (lambda: with_checkpoints(True), (2, 8, 16, 16)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), (2, 10, 16)),
    "resnet18": (lambda: zoo.resnet18(10), (2, 3, 32, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_capture_numbers_the_calls_that_a_real_forward_counts(name):
    make, shape = MODELS[name]
    model = make()
    graph = capture(model, (fake_batch(*shape),))

    def pack(t):
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, pack), Covered(pack) as mode:
        model(torch.randn(shape))
    assert mode.ops == ops(graph, covered_only=True)
    assert [c.covered for c in graph.calls if c.covered >= 0] == list(range(len(mode.ops)))


@pytest.mark.parametrize("name", MODELS)
def test_fake_and_real_recordings_agree(name):
    make, shape = MODELS[name]
    model = make()
    fake = capture(model, (torch.randn(shape),))
    real = capture(model, (torch.randn(shape),), fake=False)
    assert (fake.source, real.source) == ("fake", "real")
    assert fake.fingerprint == real.fingerprint
    assert fake.kept_bytes == real.kept_bytes
    assert [(c.op, c.covered, c.module) for c in fake.calls] == [(c.op, c.covered, c.module) for c in real.calls]


@pytest.mark.parametrize("name", MODELS)
def test_fingerprints_know_the_flow_not_the_batch(name):
    make, shape = MODELS[name]
    model = make()
    graphs = [capture(model, (fake_batch(n, *shape[1:]),)) for n in (2, 5)]
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert graphs[0].kept_bytes < graphs[1].kept_bytes


def test_fingerprints_differ_between_models():
    prints = [capture(make(), (fake_batch(*shape),)).fingerprint for make, shape in MODELS.values()]
    different = set(prints)
    assert len(different) == len(prints) - 1, "only the two kinds of checkpoint look alike from outside"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_keep_their_input_only_and_run_once(reentrant):
    runs = []

    def inner(m, t):
        runs.append(1)
        return F.relu(m[1](F.relu(t)))

    def forward(m, x):
        return m[2](checkpoint(lambda t: inner(m, t), m[0](x), use_reentrant=reentrant))

    graph = captured(forward, conv(), conv(), conv())
    assert runs == [1]
    assert ops(graph, covered_only=True) == ["conv2d", "conv2d"]
    boundary, inside = output_of(graph, "conv2d", 0), output_of(graph, "relu", 0)
    assert [read for _, _, read in saves_of(graph, boundary)] == [True]
    assert saves_of(graph, inside) == []
    assert saves_of(graph, output_of(graph, "relu", 1)) == [("conv2d", "input", True)]


def test_custom_functions_are_found_by_their_nodes():
    graph = captured(lambda m, x: F.max_pool2d(Double.apply(F.relu(m[0](x))), 2), conv())
    assert ops(graph) == ["conv2d", "relu", "Double", "mul", "max_pool2d"]
    relu, hidden = output_of(graph, "relu"), the(graph, "Double")
    assert hidden.covered == -1 and hidden.reads == (relu,)
    assert (relu, "saved_tensors", True) in [(s.storage, s.field, s.read) for s in hidden.saves]
    assert the(graph, "relu").index < hidden.index < the(graph, "max_pool2d").index
    doubled = graph.values[the(graph, "max_pool2d").operands[0]].storage
    assert graph.storages[doubled].kind == "activation"


class Silent(torch.autograd.Function):
    """Reads its input without a trace but its edge."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_function_that_saves_nothing_is_read_from_its_edge():
    def forward(m, x):
        y = F.relu(m[0](x))
        return F.max_pool2d(y, 2), Silent.apply(y)

    graph = captured(forward, conv())
    assert the(graph, "Silent").reads == (output_of(graph, "relu"),)


def test_module_backward_hooks_count_as_readers():
    model = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2))
    model[1].register_full_backward_hook(lambda *args: None)
    graph = capture(model, (fake_batch(2, 8, 16, 16),))
    readers = [c.op for c in graph.readers(output_of(graph, "relu"))]
    assert "BackwardHookFunction" in readers and readers[-1] == "max_pool2d"


@pytest.mark.parametrize(
    "ask, name", [(lambda y: y.retain_grad(), "retain_grad"), (lambda y: y.register_hook(abs), "register_hook")]
)
def test_hooks_on_tensors_are_readers(ask, name):
    graph = captured(lambda m, x: (y := F.relu(m[0](x)), ask(y))[0] * 1, conv())
    assert name in [c.op for c in graph.readers(output_of(graph, "relu"))]


def test_asking_for_a_shape_is_no_reading():
    def forward(m, x):
        y = F.relu(m[0](x))
        assert y.shape == x.size() and y.dim() == 4 and y.dtype and y.is_contiguous() and y.requires_grad
        return F.max_pool2d(y, 2)

    graph = captured(forward, conv())
    assert [c.op for c in graph.readers(output_of(graph, "relu"))] == ["max_pool2d"]


def test_what_the_model_puts_away_escapes():
    class Hoarder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.kept = conv(), None

        def forward(self, x):
            self.kept = {"deep": [F.relu(self.conv(x))]}
            return self.conv(self.kept["deep"][0]).sum()

    model = Hoarder()
    graph = capture(model, (fake_batch(2, 8, 16, 16),))
    assert graph.storages[output_of(graph, "relu")].escapes
    assert model.kept is None, "the copy's attribute, not the user's"
    assert not graph.storages[output_of(graph, "conv2d")].escapes


def test_garbage_in_a_reference_cycle_does_not_escape():
    def forward(m, x):
        cycle = [F.relu(m[0](x))]
        cycle.append(cycle)
        return m[0](cycle[0]).sum()

    assert not captured(forward, conv()).storages[output_of(captured(forward, conv()), "relu")].escapes


def test_views_and_concatenations():
    def forward(m, x):
        parts = [F.relu(m[0](x))]
        for layer in m[1:]:
            parts.append(F.relu(layer(torch.cat(parts, 1))))
        return torch.cat(parts, 1).chunk(2, 1)[0].mean()

    graph = captured(forward, conv(), nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1))
    cats = [c for c in graph.calls if c.op == "cat"]
    assert [len(c.operands) for c in cats] == [1, 2, 3]
    assert saves_of(graph, output_of(graph, "cat", 1)) == [("conv2d", "input", True)]
    chunk = the(graph, "chunk")
    assert all(not graph.values[i].whole and graph.values[i].storage in cats[2].writes for i in chunk.results)


def test_unet_upsampling_lstm_and_attention_go_through():
    def unet(m, x):
        down = F.relu(m[0](x))
        up = F.interpolate(m[1](F.max_pool2d(down, 2)), scale_factor=2)
        return m[2](torch.cat((down, up), 1))

    graph = captured(unet, conv(), conv(), nn.Conv2d(16, 8, 1))
    assert [c.op for c in graph.readers(output_of(graph, "relu"))] == ["max_pool2d", "cat"]
    graph = capture(nn.LSTM(8, 8), (fake_batch(5, 2, 8),))
    assert "lstm" in ops(graph)
    layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", dropout=0.0)
    graph = capture(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (fake_batch(5, 2, 16),))
    assert ops(graph).count("multi_head_attention_forward") == 2
    fields = {s.field for c in graph.calls for s in c.saves if c.op == "layer_norm" and not s.read}
    assert fields == {"bias"}


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
    before = copy.deepcopy(model.state_dict())
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for fake in (True, False):
        capture(model, (torch.randn(2, 8, 4, 4, generator=torch.Generator()),), fake=fake)
    after = random.getstate(), np.random.get_state(), torch.get_rng_state()
    assert states[0] == after[0] and torch.equal(states[2], after[2])
    assert all(np.array_equal(a, b) for a, b in zip(states[1], after[1], strict=True))
    assert model.calls == 0 and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_keyword_arguments_and_gradients_switched_off_outside():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv()

        def forward(self, x, *, mask=None, scale=1):
            return F.relu(self.conv(x) * mask["m"]) * scale

    with torch.no_grad():
        graph = capture(Two(), (torch.randn(2, 8, 4, 4),), {"mask": {"m": torch.ones(4, 4)}, "scale": 2})
    assert ops(graph, covered_only=True) == ["conv2d", "relu"]
    assert [s.kind for s in graph.kept() if s.shape == (4, 4)] == ["input"]


def test_inputs_that_need_gradients_and_inputs_given_twice():
    outside = conv()(torch.randn(2, 8, 16, 16))
    model = Apply(lambda m, x, y: m[0](F.relu(x, inplace=True)) + y, conv())
    graph = capture(model, (outside, outside))
    entry = the(graph, "relu")
    assert graph.storages[entry.reads[0]].kind == "input" and entry.inplace
    assert the(graph, "add").operands[1] == entry.results[0], "the same tensor, after the write"
    assert outside._version == 0 and ops(graph) == ["relu", "conv2d", "add"]


def test_a_lazy_model_is_recorded_on_its_first_real_step():
    model, x = nn.Sequential(nn.LazyLinear(8), nn.ReLU()), torch.randn(4, 8)
    with pytest.raises(CaptureError):
        capture(model, (x,))
    with Recorder(model) as recorder:
        out = model(x)
    graph = recorder.finish(out)
    assert [s.kind for s in graph.kept()] == ["input", "activation"]


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
    patched = nn.Sequential(conv())
    patched.forward = lambda x: x
    with pytest.raises(CaptureError, match="'Sequential' has a forward replaced by a function"):
        capture(patched, (fake_batch(2, 8, 4, 4),))
    stubborn = nn.Sequential(conv())
    stubborn.lock = (i for i in range(3))
    with pytest.raises(CaptureError, match="could not be captured on a copy"):
        capture(stubborn, (fake_batch(2, 8, 4, 4),))


class Wrapper:
    """A stand-in forward, as compress makes it."""

    def __init__(self, original):
        self.gistkit_original = original

    def __call__(self, *args):
        raise AssertionError("the copy runs the original forward")


def test_a_stand_in_forward_is_left_out_of_the_copy():
    model = nn.Sequential(conv(), nn.ReLU())
    model.forward = Wrapper(None)
    assert ops(capture(model, (fake_batch(2, 8, 4, 4),))) == ["conv2d", "relu"]
    assert isinstance(model.forward, Wrapper)
    other = nn.Sequential(conv(), nn.ReLU())
    other.forward = Wrapper(other[1].forward)
    assert ops(capture(other, (fake_batch(2, 8, 4, 4),))) == ["relu"]


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


def test_a_recorder_serves_once():
    recorder = Recorder()
    with pytest.raises(CaptureError, match=r"finish\(\) needs one completed forward, this recorder is new"):
        recorder.finish(None)
    with recorder:
        out = F.relu(torch.randn(3, requires_grad=True))
    assert recorder.finish(out).kept_bytes == 12
    with pytest.raises(CaptureError, match="this one is finished; make a new one"):
        recorder.__enter__()
    broken = Recorder()
    with pytest.raises(ZeroDivisionError), broken:
        F.relu(torch.randn(3, requires_grad=True))
        raise ZeroDivisionError
    with pytest.raises(CaptureError, match="this recorder is broken by an exception"):
        broken.finish(None)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert not torch.nn.modules.module._global_forward_hooks


def test_vgg16_keeps_what_gist_and_the_facts_say():
    graph = capture(zoo.vgg16(), (fake_batch(64, 3, 224, 224),))
    assert graph.kept_bytes / 2**30 == pytest.approx(4.37, abs=0.005)
    share = {"relu->conv": 0, "relu->pool": 0, "index": 0}
    for s in graph.kept():
        savers = saves_of(graph, s.id)
        maker = graph.writers(s.id)[-1].op if s.kind == "activation" else ""
        if s.dtype == "int64":
            share["index"] += s.nbytes
        elif maker == "relu" and ("max_pool2d", "self", False) in savers:
            share["relu->pool"] += s.nbytes
        elif maker == "relu" and ("conv2d", "input", True) in savers:
            share["relu->conv"] += s.nbytes
    percent = {k: round(100 * v / graph.kept_bytes, 1) for k, v in share.items()}
    assert percent == {"relu->conv": 40.5, "relu->pool": 33.4, "index": 16.7}


def test_resnet50_is_captured_within_a_second():
    model, x = zoo.resnet50(), fake_batch(64, 3, 224, 224)
    times = []
    for _ in range(2):
        start = time.process_time()
        graph = capture(model, (x,))
        times.append(time.process_time() - start)
    assert min(times) < 1.0
    assert graph.kept_bytes / 2**30 == pytest.approx(5.12, abs=0.005)
    norms = sum(graph.storages[i].nbytes for i in {s.storage for c in graph.calls for s in c.saves
                if c.op == "batch_norm" and s.field == "input"})  # fmt: skip
    assert norms / graph.kept_bytes == pytest.approx(0.517, abs=0.001)
