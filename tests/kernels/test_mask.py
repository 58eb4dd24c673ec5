"""One-bit masks on CPU tensors: the definition, PyTorch's own gradients, the layout, bad arguments."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from gistkit.kernels import ops
from gistkit.kernels.reference import mask as reference
from tests.support.tensors import FLOATS, same_bits, sixteen_bit_values, values_of

LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 2600))
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@dtypes
def test_relu_and_its_mask_on_every_bit_pattern(dtype):
    x = sixteen_bit_values(dtype, (0, 1, 0x7FFF, 0x8000, 0xFFFF))
    y, mask = ops.relu_mask1(x)
    assert same_bits(y, torch.relu(x))
    assert torch.equal(ops.bits_decode(mask, x.numel()), ~(x <= 0))
    assert torch.equal(ops.mask1_encode(x), mask)
    assert torch.equal(ops.mask1_encode(y), mask), "the output has the mask of its input"
    version = x._version
    assert torch.equal(ops.relu_mask1_(x), mask) and same_bits(x, y)
    assert x._version > version, "autograd must see the write"


@dtypes
@given(n=LENGTHS, seed=st.integers(0, 999))
def test_backward_is_pytorchs(dtype, n, seed):
    x, grad = values_of(n, dtype, seed, 0.3, False), values_of(n, dtype, seed + 1, 0.1, True)
    y, mask = ops.relu_mask1(x)
    expected = torch.ops.aten.threshold_backward(grad, y, 0)
    assert same_bits(ops.mask1_backward(grad, mask), expected)
    version = grad._version
    ops.mask1_backward_(grad, mask)
    assert same_bits(grad, expected) and (grad._version > version or n == 0)


@given(n=LENGTHS, seed=st.integers(0, 99))
def test_bit_j_of_byte_i_is_element_8i_plus_j(n, seed):
    flags = values_of(n, torch.bool, seed, 0.0, False)
    mask = ops.bits_encode(flags)
    assert np.array_equal(mask.numpy(), np.packbits(flags.numpy(), bitorder="little"))
    assert torch.equal(ops.bits_decode(mask, n), flags)


@dtypes
@pytest.mark.parametrize("p", [0.3, 0.5])
def test_dropout_backward_is_pytorchs(dtype, p):
    x = torch.ones(3001, dtype=dtype, requires_grad=True)
    y = F.dropout(x, p)
    grad = values_of(3001, dtype, 2, 0.1, False)
    (expected,) = torch.autograd.grad(y, x, grad)
    scale = torch.ones((), dtype=dtype).div_(1 - p).item()
    mask = ops.bits_encode(y.detach() != 0)
    got = ops.dropout_backward(grad, mask, scale)
    # NaN and infinity times zero are NaN in both; a NaN's payload is not compared, the rest is, to the bit
    assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().any()
    assert same_bits(got.masked_fill(got.isnan(), 0), expected.masked_fill(expected.isnan(), 0))


@dtypes
def test_blocks_join_without_a_seam(dtype, monkeypatch):
    x, grad = values_of(1013, dtype, 1, 0.3, False), values_of(1013, dtype, 3, 0.0, False)
    whole = reference.mask1_encode(x)

    def parts():
        return [
            reference.mask1_backward(grad, whole),
            reference.bits_decode(whole, 1013),
            reference.dropout_backward(grad, whole, 1.25),
        ]

    before = parts()
    monkeypatch.setattr(reference, "BLOCK", 64)
    assert torch.equal(reference.mask1_encode(x), whole)
    assert torch.equal(reference.bits_encode(before[1]), whole)
    assert all(torch.equal(a, b) for a, b in zip(before, parts(), strict=True))
