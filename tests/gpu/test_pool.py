"""The max-pool kernels on the device: against plain PyTorch there, and against the oracle on the CPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from gistkit.kernels import ops
from gistkit.kernels.layout import is_channels_last
from gistkit.kernels.pool import operators as pool
from gistkit.kernels.signed_zero import relu_keeps_negative_zero
from tests.support.kernel_laws import assert_pool_backward, assert_pool_forward
from tests.support.pool_cases import (
    COMMON_WINDOWS,
    DTYPES,
    PoolCase,
    any_bits,
    assert_same_bits,
    bits_named,
    pool_cases,
    values,
)
from tests.support.tensors import plain_nan, positive_zeros, same_bits

LAYOUTS = (torch.contiguous_format, torch.channels_last)
LARGE_WINDOWS = (*COMMON_WINDOWS, ((3, 3), (1, 1), (1, 1)), ((5, 4), (3, 2), (2, 2)))


@settings(max_examples=60)
@given(pool_cases(max_size=20))
def test_device_equals_oracle(case):
    keep_zero = bool(relu_keeps_negative_zero(case.x.cuda()))
    assert_pool_backward(ops, case, *assert_pool_forward(ops, case, "cuda", keep_zero))


def _large(dtype, layout, windows, channels=96) -> PoolCase:
    # no infinities: CUDA's channels_last kernel loses the gradient of a window of nothing but -inf
    x = values((8, channels, 57, 60), dtype, 0.0, 7) + torch.randn(8, channels, 57, 60).mul(0.5).round().to(dtype)
    x[torch.rand(x.shape) < 1e-4] = float("nan")
    x[torch.rand(x.shape) < 0.2] = -0.0
    return PoolCase(x.contiguous(memory_format=layout).cuda(), windows, False, True, True, 8)


@pytest.mark.parametrize("windows", LARGE_WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_equal_to_plain_pytorch_on_the_device(dtype, layout, windows, bits):
    if bits == 4 and windows[0][0] * windows[0][1] > 15:
        pytest.skip("20 positions need 8 bits")
    case = _large(dtype, layout, windows)
    leaf = case.x.clone(memory_format=torch.preserve_format).requires_grad_()
    expected = F.max_pool2d(torch.relu(leaf), *windows)
    y, codes = ops.maxpool_forward(case.x, *windows, False, True, True, bits)
    # a conversion from fp16 may change the payload of a NaN
    assert same_bits(*(plain_nan(t) if dtype == torch.float16 else t for t in (y, expected.detach())))
    grad_y = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, leaf, grad_y)
    grad_x = ops.maxpool_backward(grad_y, codes, 57, 60, *windows, is_channels_last(case.x), True, bits)
    assert_same_bits(positive_zeros(grad_x), positive_zeros(expected_grad))


@pytest.mark.parametrize(
    "layout, windows",
    [*((LAYOUTS[0], windows) for windows in (*COMMON_WINDOWS[1:], LARGE_WINDOWS[3])), (LAYOUTS[1], COMMON_WINDOWS[2])],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu, keep_zero", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("level", [80, 90])
def test_16_bit_maxima_are_the_bits_of_the_input(level, relu, keep_zero, dtype, layout, windows, monkeypatch):
    """Any bit pattern through the assembly for either generation: the oracle's codes, and the bits that they name."""
    if level > 10 * torch.cuda.get_device_capability()[0]:
        pytest.skip(f"needs sm_{level}")
    monkeypatch.setattr(pool, "_assembly_level", lambda x: level)
    monkeypatch.setattr(pool, "relu_keeps_negative_zero", lambda x: keep_zero)
    x = any_bits((4, 16, 57, 60), dtype, 5).contiguous(memory_format=layout)
    for bits, zero_code in ((8, relu), (4, not relu)):
        case = PoolCase(x, windows, False, relu, zero_code, bits)
        y, codes = assert_pool_forward(pool, case, "cuda", keep_zero)
        if bits == 8 and not keep_zero:
            assert torch.equal(y.cpu().contiguous().view(torch.int16), bits_named(case, codes, y))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_two_to_the_31_elements(layout):
    """A plane's outputs and their codes end beyond 2**31 elements; checked on the last image."""
    shape = (33, 64, 1024, 1024)
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB")
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda", memory_format=layout)
    x.normal_()
    y, codes = ops.maxpool_forward(x, *COMMON_WINDOWS[0], False, False, True, 4)
    last = x[-1:].clone(memory_format=torch.preserve_format).requires_grad_()
    expected = F.max_pool2d(last, 2)
    assert torch.equal(y[-1:], expected)
    grad_x = ops.maxpool_backward(y, codes, 1024, 1024, *COMMON_WINDOWS[0], is_channels_last(x), True, 4)
    (expected_grad,) = torch.autograd.grad(expected, last, torch.relu(expected))
    assert torch.equal(grad_x[-1:], expected_grad)
