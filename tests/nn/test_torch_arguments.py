"""gistkit.functional and gistkit.nn take every argument of their torch counterparts and do the same with it."""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import gistkit.functional as functional
import gistkit.nn as gnn
from tests.support.nn_cases import planted, same_bits

IMAGE = (2, 6, 9, 8)
FUNCTIONS = ("relu", "max_pool2d", "conv2d", "linear", "batch_norm", "dropout")
MODULES = ("ReLU", "MaxPool2d", "Conv2d", "Linear", "BatchNorm2d", "Dropout")


def of_torch(name):
    """The signature of PyTorch's function or class; builtins have it in the first line of their doc."""
    if name in MODULES:
        return inspect.signature(getattr(torch.nn, name))
    if name in ("conv2d", "linear"):
        namespace = {}
        exec(f"def {getattr(F, name).__doc__.split('->')[0].strip()}: ...", namespace)
        return inspect.signature(namespace[name])
    return inspect.signature(F.max_pool2d_with_indices if name == "max_pool2d" else getattr(F, name))


@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES, "relu_max_pool2d", "ReLUMaxPool2d"])
def test_the_signature_is_torchs_and_what_is_added_has_a_name_and_a_default(name):
    own = inspect.signature(getattr(gnn if name[0].isupper() else functional, name)).parameters
    torchs = of_torch({"relu_max_pool2d": "max_pool2d", "ReLUMaxPool2d": "MaxPool2d"}.get(name, name)).parameters
    face = [(p.name, p.kind, p.default) for p in own.values()]
    assert face[: len(torchs)] == [(p.name, p.kind, p.default) for p in torchs.values()]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in list(own.values())[len(torchs) :])


def outcome(call, *leaves):
    """What a call gives: results, gradients and the random state; or its error."""
    torch.manual_seed(7)
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in leaves]
    try:
        found = call(*leaves)
    except Exception as error:
        return type(error), str(error)
    found = found if isinstance(found, tuple) else (found,)
    if found[0].requires_grad:
        slope = torch.linspace(-1, 1, found[0].numel()).view(found[0].shape).to(found[0].dtype)
        (found[0] * slope).sum().abs().backward()
    return [*(t.detach() for t in found), *(t.grad for t in leaves), torch.get_rng_state()]


def assert_same(own, torchs):
    assert type(own) is type(torchs), (own, torchs)
    if isinstance(torchs, tuple):
        assert own == torchs
    else:
        assert len(own) == len(torchs) and all(same_bits(a, b) for a, b in zip(own, torchs, strict=True))


STATISTICS = torch.zeros(6), torch.ones(6)
OPERANDS = {"conv2d": [IMAGE, (4, 6, 3, 3), (4,)], "linear": [IMAGE, (4, 8), (4,)]}
CALLS = {
    "relu": [
        lambda f, x: f(x), lambda f, x: f(x * 1, True), lambda f, x: f(inplace=True, input=x * 1), lambda f, x: f(x[0]),
        lambda f, x: f(x.long()), lambda f, x: f(x + 1j), lambda f, x: f(None),
    ],
    "max_pool2d": [
        lambda f, x: f(x, 2), lambda f, x: f(x, (3, 2), [2, 1], 1, 1, True, False),
        lambda f, x: f(input=x, kernel_size=3, stride=1, padding=1, dilation=2, ceil_mode=True, return_indices=False),
        lambda f, x: f(x, 2, return_indices=True), lambda f, x: f(x, 2, None, 1, 1, True, True),
        lambda f, x: f(x, 2, []), lambda f, x: f(x[0], 2), lambda f, x: f(x.long(), 2), lambda f, x: f(x, 20),
        lambda f, x: f(x, 2, padding=2), lambda f, x: f(x, (1, 2, 3)), lambda f, x: f(x, 0),
        lambda f, x: f(x, 2, stride=0), lambda f, x: f(x, 2, dilation=0),
    ],
    "conv2d": [
        lambda f, x, w, b: f(x, w), lambda f, x, w, b: f(x, w[:, :3], b, (2, 1), [1, 0], 1, 2),
        lambda f, x, w, b: f(bias=b, weight=w[:, :3], input=x, groups=2, dilation=2, padding=(1, 2), stride=1),
        lambda f, x, w, b: f(x[0], w, b), lambda f, x, w, b: f(x, w, b, padding="same"),
        lambda f, x, w, b: f(x, w, b, 1, "valid"), lambda f, x, w, b: f(x, w, padding="same", stride=2),
        lambda f, x, w, b: f(x, w, padding="reflect"), lambda f, x, w, b: f(x + 1j, w + 1j),
        lambda f, x, w, b: f(x.long(), w), lambda f, x, w, b: f(x, w.bfloat16()), lambda f, x, w, b: f(x, w, stride=0),
        lambda f, x, w, b: f(x, w, padding=-1), lambda f, x, w, b: f(x, w, stride=(1, 1, 1)),
    ],
    "linear": [
        lambda f, x, w, b: f(x, w), lambda f, x, w, b: f(x, w, b), lambda f, x, w, b: f(bias=b, weight=w, input=x),
        lambda f, x, w, b: f(x[0, 0, 0], w, b), lambda f, x, w, b: f(x[0, 0, 0], w[0]),
        lambda f, x, w, b: f(x.long(), w),
    ],
    "batch_norm": [
        lambda f, x: f(x, None, None, training=True), lambda f, x: f(x, *STATISTICS),
        lambda f, x: f(x, *STATISTICS, torch.ones(6), torch.ones(6), True, 0.3, 1e-3),
        lambda f, x: f(
            eps=1e-3, momentum=0.0, training=True, bias=None, weight=None, running_var=None, running_mean=None, input=x
        ),
        lambda f, x: f(x[0], None, None, training=True), lambda f, x: f(x, None, None),
        lambda f, x: f(x[:1, :, 0, 0], None, None, training=True),
        lambda f, x: f(x, None, None, torch.ones(6).long(), training=True),
        lambda f, x: f(x.long(), None, None, training=True),
    ],
    "dropout": [
        lambda f, x: f(x), lambda f, x: f(x, 0.3, True, False), lambda f, x: f(x * 1, 0.3, True, True),
        lambda f, x: f(inplace=False, training=False, p=0.2, input=x), lambda f, x: f(x[0], p=1.0),
        lambda f, x: f(x, p=0.0), lambda f, x: f(x, p=1.5), lambda f, x: f(x.long()),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name, call", [(name, call) for name, calls in CALLS.items() for call in calls])
def test_functions_do_what_torchs_do(name, call):
    leaves = [planted(shape, special=False) for shape in OPERANDS.get(name, [IMAGE])]
    own, torchs = (outcome(partial(call, f), *leaves) for f in (getattr(functional, name), getattr(F, name)))
    assert_same(own, torchs)


@pytest.mark.parametrize("call", CALLS["max_pool2d"])
def test_relu_max_pool2d_is_torchs_two(call):
    x = planted(IMAGE, special=False)
    pair = functional.relu_max_pool2d, lambda input, *args, **kwargs: F.max_pool2d(F.relu(input), *args, **kwargs)
    own, torchs = (outcome(partial(call, f), x) for f in pair)
    assert_same(own, torchs)


MADE = [
    lambda nn: nn.ReLU(True),
    lambda nn: nn.ReLU(inplace=False),
    lambda nn: nn.MaxPool2d(3, None, 1, 1, True, True),
    lambda nn: nn.MaxPool2d(kernel_size=2, stride=1, padding=1, dilation=2, return_indices=False, ceil_mode=True),
    lambda nn: nn.Conv2d(6, 4, 3, 1, "same", 1, 2, False, "reflect", "cpu", torch.float32),
    lambda nn: nn.Conv2d(6, 4, (3, 1), stride=2, padding="valid", dilation=(1, 2)),
    lambda nn: nn.Conv2d(6, 4, 3, padding=1, padding_mode="replicate"),
    lambda nn: nn.Conv2d(6, 4, 3, padding=(2, 1), padding_mode="circular", dtype=torch.float64),
    lambda nn: nn.Conv2d(6, 4, 3, padding_mode="mirror"),
    lambda nn: nn.Conv2d(6, 4, 3, groups=4),
    lambda nn: nn.Linear(8, 5, False, "cpu", torch.float32),
    lambda nn: nn.Linear(in_features=8, out_features=5, device="cpu", dtype=torch.bfloat16),
    lambda nn: nn.BatchNorm2d(6, 1e-3, None, False, False, "cpu", torch.float32),
    lambda nn: nn.BatchNorm2d(6, momentum=None),
    lambda nn: nn.BatchNorm2d(6, affine=False, dtype=torch.bfloat16),
    lambda nn: nn.BatchNorm2d(6, track_running_stats=False),
    lambda nn: nn.BatchNorm2d(6, bias=False),  # a TypeError before PyTorch 2.13
    lambda nn: nn.BatchNorm2d(5),
    lambda nn: nn.Dropout(0.3, True),
    lambda nn: nn.Dropout(p=0.2, inplace=False),
    lambda nn: nn.Dropout(1.5),
]


def module_outcome(made, nn, x, train):
    """What two steps of a module give, its gradients and buffers too; or its error."""
    torch.manual_seed(3)
    try:
        module = made(nn).train(train)
    except Exception as error:
        return type(error), str(error)
    x = x.to(next((p.dtype for p in module.parameters()), x.dtype))
    found = [outcome(lambda t: module(t * 1), x) for _ in range(2)]
    if isinstance(found[0], tuple):
        return found[0]
    return [*found[0], *found[1], *(p.grad for p in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(
    "shape, train", [(IMAGE, True), (IMAGE, False), (IMAGE[1:], True), ((2, 6, 2, 8), True)], ids=str
)
def test_modules_do_what_torchs_do(made, shape, train):
    x = planted(shape, special=False)
    assert_same(*(module_outcome(made, nn, x, train) for nn in (gnn, torch.nn)))
