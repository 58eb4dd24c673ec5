"""A forward that is not the planned one: the error names what differs, whatever the plan promises."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import PlanMismatchError
from gistkit.ir.plan import Plan
from tests.runtime.program.test_plan_mismatch import equal, net, step

X, Y = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4)


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def planned(model, words):
    plan = gistkit.plan(model, X, Y, loss_fn=F.cross_entropy, **words)
    return Plan.from_json(plan.to_json())


@cache
def plan_of_net(name):
    return planned(net(), WORDS[name])


def in_place(model):
    model[2].inplace = True


def longer(model):
    model.append(nn.ReLU())


def without_a_layer(model):
    del model[7]


WORDS = {"gist": {"policy": "gist"}, "a budget": {"budget": "90%"}}
CHANGES = [
    (in_place, r"expected call 2 to be relu of '2'.*, got call 2 to be relu in place of '2'.*; make the plan from"),
    (longer, r"expected the end after call \d+, linear of '8.2', got call \d+ to be relu of '9' making float32"),
    (without_a_layer, r"expected call \d+ to be sigmoid of '7'.*, got call \d+ to be linear of '7.2'"),
]


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize(("change", "text"), CHANGES, ids=lambda c: getattr(c, "__name__", ""))
def test_another_layer_is_named(change, text, name):
    model = net()
    change(model)
    with pytest.raises(PlanMismatchError, match=text):
        step(gistkit.compress(model, plan_of_net(name)))


@pytest.mark.parametrize("name", WORDS)
def test_autocast_is_named(name):
    model = gistkit.compress(net(), plan_of_net(name))
    text = (
        r"call 0 to be conv2d of '0' making float32 of shape \(4, 8, 16, 16\), got call 0 to be conv2d of '0' making "
        r"bfloat16 .*; it was planned under no autocast: run it so, or plan it under autocast to bfloat16 on cpu"
    )
    with bfloat16(), pytest.raises(PlanMismatchError, match=text):
        model(X)
    with bfloat16():
        model = gistkit.compress(net(), planned(net(), WORDS[name]))
    with pytest.raises(
        PlanMismatchError, match=r"making bfloat16 .*, got .* making float32 .*autocast to bfloat16 on cpu: run it so"
    ):
        model(X)


@pytest.mark.parametrize("name", WORDS)
def test_an_empty_batch_is_named(name):
    model = gistkit.compress(net(), plan_of_net(name))
    with pytest.raises(PlanMismatchError, match=r"of shape \(0, 8, 16, 16\), an empty one; leave empty batches out"):
        model(X[:0])


def test_other_dtypes_and_shapes_are_named():
    plan = plan_of_net("a budget")
    with pytest.raises(PlanMismatchError, match=r"float32 of shape \(8, 3, 3, 3\) .*'0.weight', got float64 of shape"):
        gistkit.compress(net().double(), plan)(X.double())
    larger = torch.randn(4, 3, 24, 24)
    with pytest.raises(PlanMismatchError, match=r"saves \d+, of inputs of shape \(4, 3, 24, 24\); plan for inputs"):
        gistkit.compress(net(), plan)(larger)
    with pytest.raises(PlanMismatchError, match=r"could not be captured .* expected 4D input \(got 3D input\)"):
        gistkit.compress(net(), plan)(X[0])


@pytest.mark.parametrize("name", WORDS)
def test_a_memory_format_is_no_other_forward(name):
    model = net().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x = X.contiguous(memory_format=torch.channels_last)
    expected = step(copy.deepcopy(model), x)
    assert equal(step(gistkit.compress(model, plan_of_net(name)), x), expected)


def test_the_mode_is_named_without_a_budget_too():
    model = nn.Sequential(*list(net().children())[:8], nn.Dropout(), *list(net().children())[8:]).eval()
    plan = planned(model, {"policy": "gist"})
    with pytest.raises(PlanMismatchError, match="a forward in evaluation mode, got one in training mode; make the pl"):
        gistkit.compress(model.train(), plan)(X)
