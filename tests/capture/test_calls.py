"""Which functions are covered, how their arguments bind, which calls count."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from gistkit.capture import calls

X = torch.randn(2, 3, 8, 8)
W = torch.randn(3, 3, 3, 3)


class Seen(TorchFunctionMode):
    """Lists (op, bound) of the covered calls that pass by."""

    def __init__(self):
        super().__init__()
        self.covered = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        op = calls.COVERED.get(func)
        if op is not None:
            self.covered.append((op, calls.bind(func, args, kwargs)))
        return func(*args, **(kwargs or {}))


def seen(function):
    with Seen() as mode:
        function()
    return mode.covered


def iadd(x):
    x += X


WAYS = {
    "relu": [
        lambda: nn.ReLU()(X), lambda: nn.ReLU(True)(X.clone()), lambda: F.relu(X), lambda: F.relu(X, True),
        lambda: F.relu_(X.clone()), lambda: torch.relu(X), lambda: torch.relu_(X.clone()), lambda: X.relu(),
        lambda: X.clone().relu_(), lambda: F.relu(input=X, inplace=False),
    ],
    "max_pool2d": [
        lambda: nn.MaxPool2d(2)(X), lambda: F.max_pool2d(X, 2), lambda: torch.max_pool2d(X, (2, 2)),
        lambda: F.max_pool2d(X, kernel_size=[2, 2], stride=2),
    ],
    "conv2d": [lambda: nn.Conv2d(3, 3, 3)(X), lambda: F.conv2d(X, W), lambda: torch.conv2d(X, W)],
    "linear": [lambda: nn.Linear(8, 4)(X), lambda: F.linear(X, W[0, 0].new_zeros(4, 8))],
    "batch_norm": [
        lambda: nn.BatchNorm2d(3)(X), lambda: F.batch_norm(X, None, None, training=True),
        lambda: torch.batch_norm(X, None, None, None, None, True, 0.1, 1e-5, False),
    ],
    "dropout": [
        lambda: nn.Dropout()(X), lambda: F.dropout(X), lambda: torch.dropout(X, 0.5, True),
        lambda: torch.dropout_(X.clone(), 0.5, True), lambda: nn.Dropout(inplace=True)(X.clone()),
    ],
    "add": [
        lambda: X + X, lambda: torch.add(X, X), lambda: X.add(X), lambda: X.clone().add_(X), lambda: iadd(X.clone()),
        lambda: X.__add__(X), lambda: X.__radd__(X), lambda: X.clone().__iadd__(X), lambda: sum([X], X),
    ],
}  # fmt: skip


@pytest.mark.parametrize("op, way", [(op, way) for op, ways in WAYS.items() for way in ways])
def test_every_way_to_an_op_arrives_counted(op, way):
    found = [(o, b) for o, b in seen(way) if calls.is_counted(b)]
    assert [o for o, _ in found] == [op]
    assert type(found[0][1]).__name__.lower() == op.replace("_", "")
    assert isinstance(found[0][1].x, torch.Tensor)


def bound(way):
    return seen(way)[-1][1]


@pytest.mark.parametrize(
    "way",
    [
        lambda: X + 1, lambda: 1 + X, lambda: X[0, 0, 0] + X[0, 0, 1], lambda: X.int() + X.int(),
        lambda: X + torch.ones(()), lambda: sum([1, 2]) + X, lambda: torch.tensor(0).add_(1),
        lambda: torch.add(X, X, out=torch.empty_like(X)),
    ],
)  # fmt: skip
def test_additions_that_do_not_count(way):
    assert not any(calls.is_counted(b) for op, b in seen(way) if op == "add")


def test_a_pool_with_indices_is_not_covered():
    assert not any(calls.is_counted(b) for _, b in seen(lambda: F.max_pool2d(X, 2, return_indices=True)))
    assert calls.bind(F.max_pool2d, (X, 2), {"return_indices": True}) is None
