"""Models and parts that Python does not run (TorchScript, torch.compile), and fx graphs, which it does."""

import copy
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import gistkit
from gistkit.graph.copies import deep_copy
from gistkit.plan.made_for import check_forward
from gistkit.runtime.attach import compressed_forward
from tests.peaks import held_step, peaks_of_steps
from tests.planning_cases import T, X

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "error::UserWarning")
CALLS = {
    "plan": lambda model, *batch: gistkit.plan(model, *batch, loss_fn=F.cross_entropy),
    "profile": lambda model, *batch: gistkit.profile(model, *batch, loss_fn=F.cross_entropy),
    "measure": lambda model, *batch: gistkit.measure(model, *batch, loss_fn=F.cross_entropy),
    "capture": lambda model, x, _: gistkit.capture(model, (x,)),
    "compress": lambda model, *_: gistkit.compress(model),
}


def made(part=lambda module: module, middle=()):
    torch.manual_seed(0)
    middle = part(nn.Sequential(*(middle or (nn.BatchNorm2d(8), nn.ReLU()))))
    layers = nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), middle, *layers)


def traced(module, channels=8):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # a batch norm looks at its sizes
        return torch.jit.trace(module, torch.randn(len(X), channels, *X.shape[2:]), check_trace=False)


def plan(model, **words):
    return gistkit.plan(model, X, T, loss_fn=F.cross_entropy, **words)


def assert_same(plain, twin, steps=3):
    for _ in range(steps):
        for model in (plain, twin):
            model.zero_grad()
        assert torch.equal(*(held_step(model, F.cross_entropy, X, T) for model in (plain, twin)))
        pairs = zip((*plain.parameters(), *plain.buffers()), (*twin.parameters(), *twin.buffers()), strict=True)
        assert all(torch.equal(a, b) and (a.grad is None or torch.equal(a.grad, b.grad)) for a, b in pairs)


def peak(model):
    return max(peaks_of_steps(model, lambda: held_step(model, F.cross_entropy, X, T), X, T))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("kind", "make", "remedy"),
    [
        ("scripted", torch.jit.script, "the module that it was scripted from"),
        ("traced", lambda model: traced(model, 3), "the module that it was traced from"),
        ("compiled", lambda m: torch.compile(m, backend="eager"), "the module that it was compiled from, model._orig_"),
    ],
)
def test_what_python_does_not_run_is_refused(call, kind, make, remedy):
    text = f"^{call}: model must run in Python, got a {kind} module, whose forward is .*; {call} {remedy}"
    with pytest.raises(TypeError, match=text):
        CALLS[call](make(made()), X, T)


def graphs(model):
    return fx.symbolic_trace(model)


def inside(_):
    return made(fx.symbolic_trace)


@pytest.mark.parametrize("make", [graphs, inside])
@pytest.mark.parametrize("words", [None, {"policy": "gist"}, {"policy": "plain"}, {"budget": "85%"}])
def test_a_graph_module_is_a_module(make, words):
    model = make(made())
    found = None if words is None else plan(model, **words)
    twin = gistkit.compress(copy.deepcopy(model), found)
    if found is not None:
        assert peak(gistkit.compress(copy.deepcopy(model), found)) <= found.peak_bytes
    assert_same(model, twin)
    assert gistkit.report(twin)


def test_a_compressed_graph_module_copies_pickles_and_is_restored():
    plain = graphs(made())
    found = plan(plain, budget="85%")
    model = gistkit.compress(copy.deepcopy(plain), found)
    parent = nn.ModuleList([model])
    for twin in (
        copy.deepcopy(model),
        copy.deepcopy(copy.deepcopy(parent))[0],
        pickle.loads(pickle.dumps(model)),
        pickle.loads(pickle.dumps(parent))[0],
    ):
        stand_in = compressed_forward(twin)
        assert stand_in is not None and stand_in.model is twin and stand_in.engine is not model.forward.engine
        assert stand_in.engine.plan == found
        assert_same(copy.deepcopy(plain), twin, steps=2)
        assert vars(gistkit.restore(twin)).keys() == vars(plain).keys()
        assert compressed_forward(copy.deepcopy(twin)) is compressed_forward(pickle.loads(pickle.dumps(twin))) is None
    assert list(model.state_dict()) == list(plain.state_dict())
    assert plan(model, budget="85%").decisions == found.decisions
    model.graph.lint()
    model.recompile()
    assert_same(copy.deepcopy(plain), model)


@pytest.mark.parametrize("make", [made, lambda: graphs(made())])
def test_compiled_around_a_compressed_module_it_runs_eagerly(make):
    plain, model = make(), make()
    found = plan(model, budget="85%")
    around: Any = torch.compile(gistkit.compress(model, found), backend="eager")
    assert_same(plain, around)
    assert peak(around) <= found.peak_bytes


def test_a_graph_module_is_captured_with_all_that_it_has():
    """Its own deep copy leaves out what the graph does not name: here parameters of the loss."""
    model: Any = graphs(made())
    model.scale, model.unused = nn.Parameter(torch.ones(3)), nn.Linear(2, 3)

    def loss_fn(out, target):
        return F.cross_entropy(out, target) + model.scale.square().sum() + model.unused.weight.sum()

    found = gistkit.plan(model, X, T, loss_fn=loss_fn, budget="85%")
    gistkit.compress(model, found)
    assert max(peaks_of_steps(model, lambda: held_step(model, loss_fn, X, T), X, T)) <= found.peak_bytes
    copied: Any = deep_copy(gistkit.restore(model))
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert copied.unused is not model.unused and torch.equal(copied(X), model(X))


def test_a_graph_module_is_measured_and_taken_in_parts():
    model = graphs(made(middle=(nn.Conv2d(8, 8, 1), nn.ReLU())))
    assert gistkit.measure(model, X, T, loss_fn=F.cross_entropy).seconds
    found = plan(model, budget="50%", fidelity="reassociated")
    assert found.sub_batches > 1
    gistkit.compress(model, found)
    step = lambda: gistkit.step(model, F.cross_entropy, X, T)  # noqa: E731
    step()  # asks whether the parts add up
    assert max(peaks_of_steps(model, step, X, T)) <= found.peak_bytes


@pytest.mark.parametrize("part", [torch.jit.script, traced])
def test_a_scripted_part_that_trains_takes_no_budget(part):
    model = made(part)
    text = r"counts every byte, and how many '1', a scripted .* without a budget, or take the module that '1' was scri"
    with pytest.raises(gistkit.CaptureError, match=text):
        plan(model, budget="90%")
    assert_same(made(part), gistkit.compress(model))
    with pytest.raises(gistkit.GistError, match=r"TorchScript .* take the module that '1' was scripted or traced from"):
        gistkit.measure(model, X, T, loss_fn=F.cross_entropy)


class Arithmetic(nn.Module):
    def forward(self, x):
        return torch.tanh(torch.sigmoid(x * 1.5) * x + x) * 0.5


def test_a_scripted_part_makes_other_operators_once_it_ran():
    """Why it takes no budget: the same step holds more from the second run on."""
    model = made(torch.jit.script, (Arithmetic(),))
    found = plan(model, policy="gist")
    for _ in range(2):
        held_step(model, F.cross_entropy, X, T)
    later = plan(model, policy="gist")
    assert later.peak_bytes > found.peak_bytes
    gistkit.compress(model, found)
    with pytest.raises(
        gistkit.PlanMismatchError, match=r"TorchScript makes other operators .* '1' .* leave the plan o"
    ):
        model(X)


def test_a_budget_made_for_python_is_not_one_for_a_scripted_part():
    found = plan(made(), budget="90%")
    model = gistkit.compress(made(torch.jit.script), found)
    with pytest.raises(gistkit.PlanMismatchError, match=r"take the module that '1' was scripted or traced from"):
        model(X)
    graph = gistkit.capture(made(), (X,), on_cpu=True)
    check_forward(found.made_for, graph)
    with pytest.raises(
        gistkit.PlanMismatchError, match=r"got '1' as a scripted or traced module, .*; take the module th"
    ):
        check_forward(found.made_for, replace(graph, scripted=("1",)))


def frozen():
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()).eval().requires_grad_(False)


@pytest.mark.parametrize("part", [torch.jit.script, lambda module: traced(module, 3)])
@pytest.mark.parametrize("words", [{"policy": "plain"}, {"budget": "90%"}])
def test_a_scripted_part_without_gradients_is_planned_to_the_byte(part, words):
    torch.manual_seed(0)
    model = nn.Sequential(part(frozen()), *made())
    plain = copy.deepcopy(model)
    found = plan(model, **words)
    gistkit.compress(model, found)
    assert peak(model) == found.peak_bytes
    plain.load_state_dict(model.state_dict())
    assert_same(plain, model)


def test_a_pool_that_no_function_mode_sees_keeps_its_input():
    model = made(torch.jit.script, (nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 8, 1), nn.ReLU()))
    found = plan(model, policy="gist")
    assert peak(gistkit.compress(model, found)) == found.peak_bytes


def test_a_copy_of_a_scripted_part_has_leaves():
    model = made(torch.jit.script)
    copied = deep_copy(model)
    assert all(p.is_leaf and p.requires_grad for p in copied.parameters())
    plan(model)
    assert all(p.grad is None for p in model.parameters())


def by_call(model):
    model[1] = torch.compile(model[1], backend="eager")


def in_place(model):
    model[1].compile(backend="eager")


@pytest.mark.parametrize("compiled", [by_call, in_place])
def test_a_compiled_part_is_not_planned(compiled):
    model = made()
    compiled(model)
    text = r"^the module '1' is compiled by torch.compile, .*; leave that part uncompiled, or leave the plan out"
    for call in ("plan", "profile", "measure"):
        with pytest.raises(gistkit.CaptureError, match=text):
            CALLS[call](model, X, T)


def test_a_model_compiled_in_place_runs_eagerly():
    model, plain = made(), made()
    model.compile(backend="eager")
    found = plan(model, budget="90%")
    assert_same(plain, gistkit.compress(model, found))
    assert peak(model) <= found.peak_bytes
