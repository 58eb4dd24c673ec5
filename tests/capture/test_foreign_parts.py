"""Models and parts that Python does not run: those of TorchScript and torch.compile."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.capture.refusal import check_scripts
from gistkit.errors import CaptureError
from tests.support.foreign_cases import assert_same, made, plan, traced
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


def in_place(part):
    part.compile(backend="eager")
    return part


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("scripted", torch.jit.script),
        ("traced", traced),
        ("compiled", lambda part: torch.compile(part, backend="eager")),
        ("compiled", in_place),
    ],
)
def test_a_part_that_python_does_not_run_is_not_planned(kind, part):
    model = made(part)
    text = f"^the module '1' is {kind}, and no capture tells what it keeps for backward; put the module that it was "
    for call in ("plan", "profile", "measure"):
        with pytest.raises(gistkit.CaptureError, match=text):
            CALLS[call](model, X, T)
    given = gistkit.compress(made(part), plan(made(), budget="90%"))
    with pytest.raises(gistkit.PlanMismatchError, match=r"the module '1' is .* no capture tells what it keeps"):
        given(X)
    if kind != "compiled":
        assert_same(made(part), gistkit.compress(model))


def test_a_models_torchscript_functions_do_not_run_on_fake_tensors_of_a_gpu(monkeypatch):
    """Those that TorchScript has fused read memory which fake tensors do not have: an illegal access in DeBERTa."""

    class Calls(nn.Module):
        pass

    check_scripts(Calls())
    doubled = torch.jit.script(_double)
    monkeypatch.setattr(sys.modules[__name__], "doubled", doubled, raising=False)
    with pytest.raises(CaptureError, match=f"{__name__} has the TorchScript function doubled"):
        check_scripts(nn.Sequential(nn.Linear(2, 2), Calls()))


def test_a_plan_is_known_again_where_the_model_calls_torchscript_functions():
    class Scripted(nn.Module):
        double = staticmethod(torch.jit.script(_double))

        def forward(self, x):
            return self.double(x)

    model, batch = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), Scripted(), nn.Linear(8, 1)), torch.randn(8, 2)
    whole = gistkit.capture(model, (batch,), backward=True)
    assert [c.op for c in whole.calls] == ["linear", "relu", "Mul", "linear"]
    assert whole.fingerprint == gistkit.capture(model, (batch,), on_cpu=True).fingerprint


def _double(x):
    return x * 2
