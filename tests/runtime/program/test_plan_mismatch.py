"""A plan with a budget against a model that is not the planned one: what was planned, what came, what to do."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from gistkit.errors import PlanMismatchError
from gistkit.ir.plan import Plan
from gistkit.runtime.live import LiveBytes

X, Y = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4)
WORDS = {"gist": {"policy": "gist"}, "a budget": {"budget": "80%"}}
any_plan = pytest.mark.parametrize("name", WORDS)


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


def net():
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    first = (conv(3, 8), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*first, conv(8, 8), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Sigmoid(), head)


def planned(model, name="a budget"):
    plan = gistkit.plan(model, X, Y, loss_fn=F.cross_entropy, **WORDS[name])
    return Plan.from_json(plan.to_json())


@cache
def plan_of_net(name="a budget"):
    return planned(net(), name)


def step(model, x=X):
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), Y[: len(x)])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def equal(first, second):
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(first, second, strict=True))


CHANGES = {
    "a larger kernel": lambda m: m.__setitem__(3, conv(8, 8, 15)),
    "another stride": lambda m: vars(m[3]).update(stride=(2, 2)),
    "another padding": lambda m: vars(m[3]).update(padding=(0, 0)),
    "another pool": lambda m: vars(m[5]).update(kernel_size=3, padding=1),
    "another average": lambda m: vars(m[6]).update(stride=1),
    "another activation": lambda m: m.__setitem__(7, nn.Tanh()),
    "another dtype": lambda m: m[8][2].to(torch.bfloat16),
    "a frozen weight": lambda m: m[0].weight.requires_grad_(False),
    "frozen statistics": lambda m: m[1].eval(),
    "evaluation": lambda m: m.eval(),
    "one more buffer": lambda m: m.register_buffer("table", torch.zeros(100)),
}
TEXTS = {
    "a larger kernel": r"float32 of shape \(8, 8, 3, 3\).* parameter or buffer '3.weight', got .*\(8, 8, 15, 15\)",
    "another stride": r"conv2d of '3'.*stride=\[?\(?1, 1.* got .*2, 2",
    "another padding": r"conv2d of '3'.*padding=\[?\(?1, 1.* got .*0, 0",
    "another pool": r"max_pool2d of '5'.*kernel_size=\[?\(?2, 2.* got .*3, 3",
    "another average": r"expected (linear of '8.2'|at most \d+ bytes in storage|a forward that saves)",
    "another activation": r"expected call \d+ to be sigmoid of '7' making float32 .*, got call \d+ to be tanh of '7'",
    "another dtype": r"float32 of shape \(5, 8\) as parameter or buffer '8.2.weight', got bfloat16",
    "a frozen weight": r"\(8, 3, 3, 3\) with a gradient as parameter or buffer '0.weight', got .* without a gradient",
    "frozen statistics": r"call 1 to be batch_norm of '1' .training=True., got .* batch_norm of '1' .training=False.",
    "evaluation": r"in training mode, got one in evaluation mode with gradients on; call model\.train\(\), plan",
    "one more buffer": r"expected none as parameter or buffer 'table', got float32 of shape \(100,\)",
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("when", ["before", "after a step"])
def test_another_model_than_the_planned_one_is_refused(what, when):
    if what == "another average" and when == "after a step":
        return  # no covered call reads what a pool of PyTorch's makes, so nobody asks once the plan is attached
    model = net()
    if when == "before":
        CHANGES[what](model)
    gistkit.compress(model, plan_of_net())
    if when == "after a step":
        step(model)
        CHANGES[what](model)
    with pytest.raises(PlanMismatchError, match=TEXTS[what]):
        step(model)


def test_what_changes_no_bytes_is_carried_out():
    plan = plan_of_net()
    model = gistkit.compress(net(), plan)
    step(model)
    model[1].__dict__.update(eps=0.1, momentum=0.5)
    reference = copy.deepcopy(model)
    gistkit.restore(reference)
    assert equal(step(model), step(reference))
    assert equal(step(model, X[:3]), step(reference, X[:3]))
    renamed = nn.Sequential()
    for i, part in enumerate(net()):
        renamed.add_module(f"part_{i}", part)
    step(gistkit.compress(renamed, plan))


class Spread(nn.Module):
    """A convolution that may be given every second column of a map twice as wide, which it holds whole."""

    def __init__(self):
        super().__init__()
        self.conv, self.wide = conv(3, 8), False

    def forward(self, x):
        x = torch.cat([x, x], 3)[..., ::2] if self.wide else x
        return F.relu(self.conv(x)).mean()


def test_an_operand_that_lies_over_more_memory_is_refused():
    model = Spread()
    gistkit.compress(model, gistkit.plan(model, X, budget="100%"))(X).backward()
    model.wide = True
    text = rf"conv2d of 'conv', covered call 0, of at most {X.nbytes} bytes, got an operand of {2 * X.nbytes - 4}; plan"
    with pytest.raises(PlanMismatchError, match=text):
        model(X)


def test_an_input_that_needs_a_gradient_is_part_of_the_plan():
    model = gistkit.compress(net(), plan_of_net())
    with pytest.raises(PlanMismatchError, match=r"need gradients: \[False\], got .*: \[True\]; plan with such"):
        model(X.clone().requires_grad_())
    wants = X.clone().requires_grad_()
    plan = gistkit.plan(net(), wants, Y, loss_fn=F.cross_entropy, budget="90%")
    step(gistkit.compress(net(), plan), wants)


def test_a_budget_for_evaluation_mode_is_kept():
    model = net().eval()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.requires_grad_(False)
    step(model)
    expected = step(copy.deepcopy(model))
    plan = planned(model)
    assert plan.contract.training is False
    twin = gistkit.compress(copy.deepcopy(model), plan)
    twin.zero_grad(set_to_none=True)
    with LiveBytes(timeline=False) as live:
        live.track(twin, X, Y)
        got = step(twin)
    assert equal(got, expected) and live.peak_bytes <= (plan.budget_bytes or 0)
    assert gistkit.report(twin).stats is not None
    with pytest.raises(PlanMismatchError, match=r"in evaluation mode, got one in training mode .*call model\.eval"):
        step(twin.train())
    with torch.no_grad():
        assert torch.equal(twin(X), model.train()(X))


LAYERS = {
    "in place": lambda m: vars(m[2]).update(inplace=True),
    "longer": lambda m: m.append(nn.ReLU()),
    "without a layer": lambda m: m.__delitem__(7),
}
NAMED = {
    "in place": r"expected call 2 to be relu of '2'.*, got call 2 to be relu in place of '2'.*; make the plan from",
    "longer": r"expected the end after call \d+, linear of '8.2', got call \d+ to be relu of '9' making float32",
    "without a layer": r"expected call \d+ to be sigmoid of '7'.*, got call \d+ to be linear of '7.2'",
}


@any_plan
@pytest.mark.parametrize("what", LAYERS)
def test_another_layer_is_named(what, name):
    model = net()
    LAYERS[what](model)
    with pytest.raises(PlanMismatchError, match=NAMED[what]):
        step(gistkit.compress(model, plan_of_net(name)))


@any_plan
def test_autocast_is_named(name):
    model = gistkit.compress(net(), plan_of_net(name))
    text = (
        r"call 0 to be conv2d of '0' making float32 of shape \(4, 8, 16, 16\), got call 0 to be conv2d of '0' making "
        r"bfloat16 .*; it was planned under no autocast: run it so, or plan it under autocast to bfloat16 on cpu"
    )
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(PlanMismatchError, match=text):
            model(X)
        model = gistkit.compress(net(), planned(net(), name))
    text = r"making bfloat16 .*, got .* making float32 .*autocast to bfloat16 on cpu: run it so"
    with pytest.raises(PlanMismatchError, match=text):
        model(X)


@any_plan
def test_an_empty_batch_is_named(name):
    model = gistkit.compress(net(), plan_of_net(name))
    with pytest.raises(PlanMismatchError, match=r"of shape \(0, 8, 16, 16\), an empty one; leave empty batches out"):
        model(X[:0])


def test_other_dtypes_and_shapes_are_named():
    plan = plan_of_net()
    with pytest.raises(PlanMismatchError, match=r"float32 of shape \(8, 3, 3, 3\) .*'0.weight', got float64 of shape"):
        gistkit.compress(net().double(), plan)(X.double())
    larger = torch.randn(4, 3, 24, 24)
    with pytest.raises(PlanMismatchError, match=r"saves \d+, of inputs of shape \(4, 3, 24, 24\); plan for inputs"):
        gistkit.compress(net(), plan)(larger)
    with pytest.raises(PlanMismatchError, match=r"could not be captured .* expected 4D input \(got 3D input\)"):
        gistkit.compress(net(), plan)(X[0])


@any_plan
def test_a_memory_format_is_no_other_forward(name):
    model = net().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    x = X.contiguous(memory_format=torch.channels_last)
    expected = step(copy.deepcopy(model), x)
    assert equal(step(gistkit.compress(model, plan_of_net(name)), x), expected)


def test_the_mode_is_named_without_a_budget_too():
    model = nn.Sequential(*list(net().children())[:8], nn.Dropout(), *list(net().children())[8:]).eval()
    plan = planned(model, "gist")
    with pytest.raises(PlanMismatchError, match="a forward in evaluation mode, got one in training mode; make the pl"):
        gistkit.compress(model.train(), plan)(X)
