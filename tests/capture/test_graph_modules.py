"""fx graphs, which Python runs: modules like others, however they copy, pickle and change."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import gistkit
from gistkit.capture.isolation import plain_copy
from tests.support.foreign_cases import assert_same, made, plan
from tests.support.peaks import held_step, peaks_of_steps
from tests.support.planning_cases import T, X

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "error::UserWarning")


def test_a_compressed_graph_module_is_restored_before_it_is_copied():
    plain = fx.symbolic_trace(made())
    found = plan(plain, budget="85%")
    model = gistkit.compress(copy.deepcopy(plain), found)
    for copied in (copy.deepcopy, pickle.dumps, lambda m: copy.deepcopy(nn.ModuleList([m]))):
        with pytest.raises(gistkit.CompressError, match=r"call gistkit.restore\(model\) before copying"):
            copied(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert plan(model, budget="85%").decisions == found.decisions
    model.graph.lint()
    model.recompile()
    assert_same(copy.deepcopy(plain), model)
    assert vars(gistkit.restore(model)).keys() == vars(plain).keys()
    pickle.loads(pickle.dumps(model))


def test_a_graph_module_is_captured_with_all_that_it_has():
    """Its own deep copy leaves out what the graph does not name: here parameters of the loss."""
    model: Any = fx.symbolic_trace(made())
    model.scale, model.unused = nn.Parameter(torch.ones(3)), nn.Linear(2, 3)

    def loss_fn(out, target):
        return F.cross_entropy(out, target) + model.scale.square().sum() + model.unused.weight.sum()

    found = gistkit.plan(model, X, T, loss_fn=loss_fn, budget="85%")
    gistkit.compress(model, found)
    assert max(peaks_of_steps(model, lambda: held_step(model, loss_fn, X, T), X, T)) <= found.peak_bytes
    copied: Any = plain_copy(gistkit.restore(model))
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert copied.unused is not model.unused and torch.equal(copied(X), model(X))
