"""The CPU's max-pool with window positions against plain PyTorch, bit for bit; the operators' shapes and refusals."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

from gistkit import formats
from gistkit.kernels import forward_geometry, ops
from gistkit.kernels.layout import is_channels_last
from gistkit.kernels.reference import pool as reference
from tests.support.pool_cases import PoolCase, assert_same_bits, pool_cases, values


def plain(case: PoolCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, input, leaf) of the same pool in plain PyTorch; under zero_code alone the input is a ReLU's output."""
    leaf = case.x.clone(memory_format=torch.preserve_format).requires_grad_()
    pooled = torch.relu(leaf) if case.relu or case.zero_code else leaf
    return F.max_pool2d(pooled, *case.windows, ceil_mode=case.ceil_mode), pooled, leaf


@given(pool_cases())
def test_output_and_gradient_equal_plain_pytorch(case):
    # zero_code without relu is for an input that already is a ReLU's output
    used = replace(case, x=torch.relu(case.x)) if case.zero_code and not case.relu else case
    y, codes = ops.maxpool_forward(*used.forward_args)
    assert codes.dtype == torch.uint8 and codes.numel() == formats.argmax_bytes(y.numel(), case.bits)
    expected, pooled, leaf = plain(case)
    assert_same_bits(y, expected)
    layout = torch.channels_last if is_channels_last(case.x) else torch.contiguous_format
    assert y.is_contiguous(memory_format=layout)
    grad_y = case.gradient(y)
    grad_x = ops.maxpool_backward(*case.backward_args(grad_y, codes))
    # with zero_code the codes carry the ReLU's mask; without it the gradient is that of the pool alone
    source = leaf if case.zero_code else pooled
    (expected_grad,) = torch.autograd.grad(expected, source, grad_y)
    assert_same_bits(grad_x, expected_grad)
    assert grad_x.is_contiguous(memory_format=layout)


def test_sums_of_overlapping_windows_follow_the_order_and_dtype_of_the_cpu():
    # the centre is the maximum of all four windows; 1 + 3 * 2**-9 rounds to 1 in bf16 if every addition rounds
    x = torch.zeros(1, 1, 3, 3, dtype=torch.bfloat16)
    x[..., 1, 1] = 1
    windows = ((2, 2), (1, 1), (0, 0))
    _, codes = ops.maxpool_forward(x, *windows, False, False, False, 4)
    grad_y = torch.tensor([1.0, 2**-9, 2**-9, 2**-9]).view(1, 1, 2, 2)
    in_bf16 = ops.maxpool_backward(grad_y.bfloat16(), codes, 3, 3, *windows, False, False, 4)
    in_fp32 = ops.maxpool_backward(grad_y, codes, 3, 3, *windows, False, False, 4)
    assert in_bf16[0, 0, 1, 1] == 1 and in_fp32[0, 0, 1, 1] == 1 + 3 * 2**-9


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_positions_in_storage_order_low_nibble_first(bits):
    x = torch.tensor([[3.0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [5, 9, 9, 0, 0]]).view(1, 1, 4, 5)
    windows = ((2, 2), (2, 1), (0, 0))
    _, codes = ops.maxpool_forward(x, *windows, False, False, True, bits)
    none = 15 if bits == 4 else 255
    positions = [0, none, 1, 0, 3, 2, 2, none]
    packed = [a | (b << 4) for a, b in zip(positions[::2], positions[1::2], strict=True)]
    assert codes.tolist() == (packed if bits == 4 else positions)


def test_corner_rules():
    nan, inf = float("nan"), float("inf")
    windows = ((1, 4), (1, 4), (0, 0))
    rows = torch.tensor(
        [[nan, 1, nan, 2], [-inf, -inf, -inf, -inf], [1, 2, 2, 1], [-0.0, 0, 0, -0.0], [-1, -1, -2, nan]]
    )
    y, codes = ops.maxpool_forward(rows.view(1, 1, 5, 4), *windows, False, False, False, 8)
    assert codes.tolist() == [2, 0, 1, 0, 3], "last NaN, first of equals, first where nothing is above -inf"
    assert y.flatten()[0].isnan() and torch.signbit(y.flatten()[3])
    _, codes = ops.maxpool_forward(rows.view(1, 1, 5, 4), *windows, False, True, True, 8)
    assert codes.tolist() == [2, 255, 1, 255, 3], "no gradient but where the maximum is positive or NaN"


@pytest.mark.parametrize("images, layout", [(1, torch.channels_last), (2, torch.contiguous_format)])
def test_slices_of_the_batch_join_seamlessly(images, layout, monkeypatch):
    x = values((7, 3, 9, 9), torch.float32, 0.1, 5).contiguous(memory_format=layout)
    args = (x, (3, 3), (2, 2), (0, 0), False, False, False, 4)
    y, codes = reference.maxpool_forward(*args)
    monkeypatch.setattr(reference, "SLICE_OUTPUTS", images * 3 * 4 * 4)
    sliced_y, sliced_codes = reference.maxpool_forward(*args)
    assert_same_bits(sliced_y, y)
    assert torch.equal(sliced_codes, codes)
    backward = (torch.randn(y.shape), codes, 9, 9, *args[1:4], is_channels_last(x), False, 4)
    sliced_grad = reference.maxpool_backward(*backward)
    monkeypatch.undo()
    assert_same_bits(sliced_grad, reference.maxpool_backward(*backward))


def test_an_image_beyond_the_reach_of_a_launch_is_pytorchs():
    x = torch.empty(2, 4, 2**15, 2**13 + 2, dtype=torch.bfloat16, device="meta")
    assert forward_geometry(x, (2, 2), (2, 2), (0, 0), False).images == 0


def test_sixteen_positions_fit_four_bits_without_the_zero_code():
    windows = ((4, 4), (2, 2), (0, 0))
    y, codes = ops.maxpool_forward(torch.arange(16.0).view(1, 1, 4, 4), *windows, False, False, False, 4)
    assert y.item() == 15 and codes.tolist() == [15]
