"""Mask kernels on a CUDA device: against PyTorch there, and against the oracle on CPU tensors."""

import pytest
import torch
from torch.nn import functional as F

from gistkit.kernels import ops
from gistkit.kernels.signed_zero import relu_keeps_negative_zero
from tests.support.kernel_laws import assert_masks
from tests.support.tensors import FLOATS, bits, sixteen_bit_values, values_of

SIZES = (0, 1, 7, 8, 16, 1000, 2**20, 2**20 + 8, 2**20 + 48, 2**22 + 5)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
sizes = pytest.mark.parametrize("n", SIZES)


@dtypes
@sizes
def test_kernels_equal_the_oracle(dtype, n):
    assert_masks(ops, n, dtype, 1, "cuda", bool(relu_keeps_negative_zero(torch.empty(1, dtype=dtype, device="cuda"))))


@dtypes
def test_relu_and_backward_are_pytorchs_on_the_device(dtype):
    x = sixteen_bit_values(dtype).cuda()
    grad = x.flip(0).clone()
    theirs = torch.relu(x)
    y, mask = ops.relu_mask1(x)
    assert torch.equal(bits(y), bits(theirs))
    assert torch.equal(ops.relu_mask1_(z := x.clone()), mask) and torch.equal(bits(z), bits(theirs))
    expected = torch.ops.aten.threshold_backward(grad, theirs, 0)
    assert torch.equal(bits(ops.mask1_backward(grad, mask)), bits(expected))


@dtypes
@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
def test_dropout_backward_is_pytorchs_on_the_device(dtype, p):
    x = torch.ones(2**20 + 3, dtype=dtype, device="cuda", requires_grad=True)
    y = F.dropout(x, p)
    # special values among them: NaN and infinity times zero are a NaN whose bits are the hardware's
    grad = values_of(x.numel(), dtype, 0, 0.1, False).cuda()
    (expected,) = torch.autograd.grad(y, x, grad)
    # CUDA's own backward multiplies by the fp32 scale, not rounded to the dtype
    got = ops.dropout_backward(grad, ops.bits_encode(y.detach() != 0), 1 / (1 - p))
    assert got.isnan().any() and torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("n", [2**31 + 4096 + 3, 2**31 + 4096])
def test_more_than_two_to_the_31_elements(n):
    if torch.cuda.mem_get_info()[0] < 4 * n:
        pytest.skip("needs 9 GB of device memory")
    flags = torch.zeros(n, dtype=torch.bool, device="cuda")
    flags[-2:] = True
    flags[::1_000_003] = True
    mask = ops.bits_encode(flags)
    assert mask[:8].tolist() == [1, 0, 0, 0, 0, 0, 0, 0] and mask[-1].item() == (0b110 if n % 8 else 0b11000000)
    assert torch.equal(ops.bits_decode(mask, n), flags)
