"""Capture: who reads a tensor, seen or hidden, and who still holds it afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from gistkit.capture.entry import capture
from gistkit.planning.cost.times import step_fingerprint
from tests.support.graphs import Double, Unsaved, captured, conv, fake_batch, ops, output_of, saves_of, the
from tests.support.models import Call


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


def test_a_function_that_saves_nothing_is_read_from_its_edge():
    def forward(m, x):
        y = F.relu(m[0](x))
        return F.max_pool2d(y, 2), Unsaved.apply(y)

    graph = captured(forward, conv())
    assert the(graph, "Unsaved").reads == (output_of(graph, "relu"),)


@pytest.mark.parametrize(
    "ask, name", [(lambda y: y.retain_grad(), "retain_grad"), (lambda y: y.register_hook(abs), "register_hook")]
)
def test_hooks_on_tensors_are_readers(ask, name):
    graph = captured(lambda m, x: (y := F.relu(m[0](x)), ask(y))[0] * 1, conv())
    assert name in [c.op for c in graph.readers(output_of(graph, "relu"))]


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


@pytest.mark.parametrize("layers", [(nn.LSTM,), (nn.GRU, nn.LSTM)])
def test_every_capture_of_a_recurrent_layer_gives_the_same_tasks(layers):
    """Its two biases have one gradient, which is copied for the second, whatever fake tensors remember."""

    def recurrent():
        return nn.Sequential(*(m for kind in layers for m in (kind(8, 8), Call(lambda out: out[0]))))

    FakeTensorMode.cache_clear()
    graphs = [capture(recurrent(), (torch.randn(5, 3, 8),), backward=True) for _ in range(3)]
    assert len({step_fingerprint(graph) for graph in graphs}) == 1
    assert [t.op for t in graphs[0].tasks].count("accumulate") >= 1
