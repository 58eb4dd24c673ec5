"""Capture: what one forward calls and keeps, on a fake copy and on a real step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gistkit import zoo
from gistkit.capture import calls
from gistkit.capture.entry import capture
from tests.support.graphs import Apply, Functional, Residual, captured, conv, fake_batch, ops, output_of, saves_of, the


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


def test_autocast_copies_of_weights_are_parameters():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = capture(model, (fake_batch(64, 64),))
    kept = graph.kept()
    assert {s.dtype for s in kept} == {"bfloat16"}
    assert [s.nbytes for s in kept] == [64 * 64 * 2] * 2, "the cast input, the ReLU's output; no weights"


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


class Covered(TorchFunctionMode):
    """The runtime's side of the numbering rule."""

    def __init__(self, pack):
        super().__init__()
        self.pack, self.ops = pack, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        op = calls.COVERED.get(func)
        if op is not None and calls.is_counted(calls.bind(func, args, kwargs)) and calls.region_is_open(self.pack):
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
def test_a_capture_is_a_real_forwards_recording_whatever_the_batch(name):
    make, shape = MODELS[name]
    model = make()
    graph = capture(model, (fake_batch(*shape),))

    def pack(t):
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, pack), Covered(pack) as mode:
        model(torch.randn(shape))
    assert mode.ops == ops(graph, covered_only=True)
    assert [c.covered for c in graph.calls if c.covered >= 0] == list(range(len(mode.ops)))
    real = capture(model, (torch.randn(shape),), fake=False)
    assert (graph.source, real.source) == ("fake", "real")
    assert (graph.fingerprint, graph.kept_bytes) == (real.fingerprint, real.kept_bytes)
    assert [(c.op, c.covered, c.module) for c in graph.calls] == [(c.op, c.covered, c.module) for c in real.calls]
    more = capture(model, (fake_batch(5, *shape[1:]),))
    assert graph.fingerprint == more.fingerprint and graph.kept_bytes < more.kept_bytes
