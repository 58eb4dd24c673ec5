"""The covered ops under torch.autocast, bit for bit as PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from gistkit import functional
from gistkit.nn.autocast import cast
from tests.support.nn_cases import assert_same, planted


def _under(dtype, f):
    def run(*tensors):
        with torch.autocast("cpu", dtype):
            return f(*tensors)

    return run


def _operands(*shapes, dtype=torch.float32):
    return [planted(shape, dtype, special=False).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "given", "bias"),
    [(torch.bfloat16, torch.float32, True), (torch.float16, torch.float32, False),
     (torch.bfloat16, torch.float16, True), (torch.bfloat16, torch.bfloat16, False)],
)  # fmt: skip
def test_lowered_ops(dtype, given, bias):
    conv = _operands((2, 3, 8, 8), (4, 3, 3, 3), (4,), dtype=given)[: 2 + bias]
    assert_same(_under(dtype, functional.conv2d), _under(dtype, F.conv2d), conv, special=False)
    linear = _operands((2, 6, 8), (4, 8), (4,), dtype=given)[: 2 + bias]
    assert_same(_under(dtype, functional.linear), _under(dtype, F.linear), linear, special=False)
    mixed = [*_operands((6, 8)), *_operands((4, 8), dtype=given)]
    assert_same(_under(dtype, functional.linear), _under(dtype, F.linear), mixed, special=False)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "own, plain",
    [
        (functional.relu, F.relu),
        (functional.dropout, F.dropout),
        (lambda x: functional.max_pool2d(x, 3, 2), lambda x: F.max_pool2d(x, 3, 2)),
        (lambda x: functional.batch_norm(x, None, None, training=True),
         lambda x: F.batch_norm(x, None, None, training=True)),
    ],
)  # fmt: skip
def test_ops_that_take_what_they_get(own, plain, given):
    x = _operands((2, 3, 8, 8), dtype=given)
    assert_same(_under(torch.bfloat16, own), _under(torch.bfloat16, plain), x, special=False)


def test_float64_and_its_error():
    conv = [planted((2, 3, 8, 8)).double().requires_grad_(), planted((4, 3, 3, 3)).double().requires_grad_()]
    assert_same(_under(torch.bfloat16, functional.conv2d), _under(torch.bfloat16, F.conv2d), conv, special=False)
    mixed = [conv[0], *_operands((4, 3, 3, 3))]
    for f in (functional.conv2d, F.conv2d):
        with pytest.raises(RuntimeError, match="expected scalar type Double but found BFloat16"):
            _under(torch.bfloat16, f)(*mixed)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_weight_used_twice_is_cast_once(enabled):
    x, weight = _operands((6, 8), (8, 8))

    def plain(x, weight):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled):
            return F.linear(F.linear(F.linear(x, weight), weight), weight)

    def own(x, weight):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled):
            # the second use is PyTorch's own: both find the same cast
            return functional.linear(F.linear(functional.linear(x, weight), weight), weight)

    assert_same(own, plain, [x, weight], special=False)
    # the cache decides: in bf16 the sum of three gradients rounds otherwise than in fp32
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        uncached = functional.linear(functional.linear(functional.linear(x, weight), weight), weight)
    grad = torch.ones_like(uncached)
    differs = torch.autograd.grad(plain(x, weight), weight, grad)[0] != torch.autograd.grad(uncached, weight, grad)[0]
    assert differs.any() == enabled


@pytest.mark.parametrize("shape", [(4,), (4, 4), (4, 4, 3), (4, 4, 3, 3), (4, 4, 3, 3, 3)])
def test_a_leaf_is_cast_once_a_region(shape):
    leaf = planted(shape, special=False).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        first, second = cast("linear", "cpu", leaf, leaf)
        (third,) = cast("linear", "cpu", leaf)
    with torch.autocast("cpu", torch.bfloat16):
        (other,) = cast("linear", "cpu", leaf)
    assert first is second is third is not other
    assert first.shape == leaf.shape and first.stride() == leaf.stride() and first.requires_grad
    assert torch.equal(first, leaf.bfloat16())
