"""The predicted peak of a step beside that of the code which Inductor writes for an H200, run on meta tensors."""

import warnings

import pytest
import torch
from torch import nn

from bench.networks import DenseLayer
from gistkit.compiled import Settings
from gistkit.compiled.partitioner import Moves
from tests.compiled.test_partitioner import run_edited
from tests.support.compiled_cases import case

with warnings.catch_warnings():  # PyTorch's own, of torch.jit
    warnings.simplefilter("ignore")
    from bench.compiled_peaks import peaks


def dense():
    """A max-pool, norms, and a concatenation of what others read too."""
    layers = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), DenseLayer(32, 16)
    return nn.Sequential(*layers), torch.zeros(64, 3, 32, 32).to(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="reads Inductor's code by its private names")
def test_the_prediction_is_the_peak_of_inductors_code():
    told, forward, backward = peaks(dense, Settings())
    assert told == pytest.approx(max(forward, backward), rel=0.05)


def test_what_is_kept_is_computed_where_its_operands_are_made():
    model, x, y = case("vgg", rows=32)
    last = []

    def edit(pair):
        moves = Moves(pair, Settings(fidelity="reassociated"))
        moves.all()
        moves.finish()
        nodes = list(pair.forward.graph.nodes)
        masks = [nodes.index(n) for n in pair.tensors if n.name.startswith("mask1")]
        head = max(i for i, n in enumerate(nodes) if n.target is torch.ops.aten.addmm.default)
        last.append((max(masks), head))

    run_edited(edit, model, x, y)
    assert last[0][0] < last[0][1]
