"""Models and parts that Python does not run: those of TorchScript and torch.compile."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.capture.isolation.copies import deep_copy
from gistkit.planning.contract import check_forward
from tests.support.foreign_cases import assert_same, made, peak, plan, traced
from tests.support.peaks import held_step
from tests.support.planning_cases import T, X

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "error::UserWarning")
CALLS = {
    "plan": lambda model, *batch: gistkit.plan(model, *batch, loss_fn=F.cross_entropy),
    "profile": lambda model, *batch: gistkit.profile(model, *batch, loss_fn=F.cross_entropy),
    "measure": lambda model, *batch: gistkit.measure(model, *batch, loss_fn=F.cross_entropy),
    "capture": lambda model, x, _: gistkit.capture(model, (x,)),
    "compress": lambda model, *_: gistkit.compress(model),
}


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
    check_forward(found.contract, graph)
    with pytest.raises(
        gistkit.PlanMismatchError, match=r"got '1' as a scripted or traced module, .*; take the module th"
    ):
        check_forward(found.contract, replace(graph, scripted=("1",)))


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


def tied(part, python) -> Any:
    """Two parts of one module, the first perhaps in Python, and a part that is there twice."""
    torch.manual_seed(0)
    conv, again = nn.Conv2d(3, 3, 3, padding=1), part(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    return nn.Sequential(conv if python else part(conv), nn.ReLU(), part(conv), again, again, *made())


@pytest.mark.parametrize("part", [torch.jit.script, lambda module: traced(module, 3)])
@pytest.mark.parametrize("python", [True, False])
def test_what_scripted_parts_share_stays_shared(part, python):
    plain, model = tied(part, python), tied(part, python)
    copied: Any = deep_copy(model)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in copied.named_parameters()] == names
    assert copied[0].weight is copied[2].weight is not model[0].weight and copied[3] is copied[4] is not model[3]
    assert torch.equal(copied.eval()(X), deep_copy(model).eval()(X))
    assert len(gistkit.capture(model, (X,)).state) == len([*model.parameters(), *model.buffers()])
    assert plan(model, policy="gist").peak_bytes
    assert_same(plain, gistkit.compress(model), steps=2)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(1 << 23), requires_grad=False)

    def forward(self, x):
        return x + 1


def test_a_capture_takes_no_memory_for_scripted_weights():
    """The first forward under a budget is captured on a copy: here of 32 MiB, more than all else."""
    model = nn.Sequential(torch.jit.script(Table()), *made())
    found = plan(model, budget="100%")
    assert peak(gistkit.compress(model, found)) <= found.peak_bytes


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
