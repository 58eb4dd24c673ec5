"""A kernel's bits are the oracle's: one law a family, for the interpreter (``where``: cpu) and a device (cuda)."""

from types import ModuleType

import torch

from gistkit.kernels.reference import integers as integer_oracle
from gistkit.kernels.reference import mask as mask_oracle
from gistkit.kernels.reference import narrow as narrow_oracle
from gistkit.kernels.reference import pool as pool_oracle
from tests.support.pool_cases import PoolCase, assert_same_bits
from tests.support.tensors import FLOATS, plain_nan, positive_zeros, same_bits, values_of


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, all NaN being one: the CPU oracle rewrites NaN payloads of 16-bit dtypes, the kernels keep them."""
    return same_bits(plain_nan(a.cpu()), plain_nan(b.cpu()))


def assert_masks(kernels: ModuleType, n: int, dtype: torch.dtype, seed: int, where: str, keep_zero: bool) -> None:
    """Every mask operator; ``keep_zero``: what the ReLU there makes of -0.0."""
    x, grad = values_of(n, dtype, seed, 0.3, seed % 3 == 0), values_of(n, dtype, seed + 1, 0.1, seed % 3 == 1)
    y, mask = kernels.relu_mask1(x.to(where))
    expected_y, expected_mask = mask_oracle.relu_mask1(x)
    assert torch.equal(mask.cpu(), expected_mask)
    assert same(y, expected_y if keep_zero else positive_zeros(expected_y))
    assert torch.equal(kernels.mask1_encode(x.to(where)).cpu(), expected_mask)
    z = x.to(where).clone()
    assert torch.equal(kernels.relu_mask1_(z), mask) and same_bits(z, y)
    for name, more in (("mask1_backward", ()), ("dropout_backward", (1.4285714,))):
        expected = getattr(mask_oracle, name)(grad, expected_mask, *more)
        assert same(getattr(kernels, name)(grad.to(where), mask, *more), expected)
    overwritten = grad.to(where).clone()
    kernels.mask1_backward_(overwritten, mask)
    assert same(overwritten, mask_oracle.mask1_backward(grad, expected_mask))
    flags = x > 0
    encoded = kernels.bits_encode(flags.to(where))
    assert torch.equal(encoded.cpu(), mask_oracle.bits_encode(flags))
    assert torch.equal(kernels.bits_decode(encoded, n).cpu(), flags)


def assert_pool_forward(kernels: ModuleType, case: PoolCase, where: str, keep_zero: bool) -> tuple:
    """Output and codes, which are returned; ``keep_zero``: what the ReLU there makes of -0.0."""
    y, codes = kernels.maxpool_forward(case.x.to(where), *case.forward_args[1:])
    expected, expected_codes = pool_oracle.maxpool_forward(*case.forward_args)
    assert_same_bits(y, positive_zeros(expected) if case.relu and not keep_zero else expected)
    assert y.stride() == expected.stride() and torch.equal(codes.cpu(), expected_codes)
    return y, codes


def assert_pool_backward(kernels: ModuleType, case: PoolCase, y: torch.Tensor, codes: torch.Tensor) -> None:
    """The kernels add in fp32, as CUDA does, and round once."""
    grad_y = case.gradient(y.cpu())
    grad_x = kernels.maxpool_backward(*case.backward_args(grad_y.to(y.device), codes))
    expected = pool_oracle.maxpool_backward(*case.backward_args(grad_y.float(), codes.cpu())).to(grad_y.dtype)
    assert_same_bits(grad_x, expected)
    assert grad_x.stride() == expected.stride()


def assert_narrow(kernels: ModuleType, x: torch.Tensor, fmt: str, scaling: str, where: str, targets=FLOATS) -> None:
    """Codes, exponents and what they decode to."""
    codes, exponents = kernels.narrow_encode(x.to(where), fmt, scaling)
    expected = narrow_oracle.narrow_encode(x, fmt, scaling)
    assert torch.equal(exponents.cpu(), expected[1]) and torch.equal(codes.cpu(), expected[0])
    for dtype in targets:
        decoded = kernels.narrow_decode(codes, exponents, x.numel(), dtype, fmt, scaling)
        assert same_bits(decoded.cpu(), narrow_oracle.narrow_decode(*expected, x.numel(), dtype, fmt, scaling))


def assert_decodes(kernels: ModuleType, fmt: str, bits: int, dtype: torch.dtype, where: str, exponents) -> None:
    """Every code, unscaled (None) and under these exponent bytes."""
    n = 2**bits
    codes = torch.arange(n).to(torch.uint8 if fmt == "fp8" else torch.int16)
    codes = narrow_oracle.fp10_pack(codes) if fmt == "fp10" else codes
    for exponent in exponents:
        scaling, count = ("none", 0) if exponent is None else ("block", n // 128)
        scales = torch.full((count,), exponent or 0, dtype=torch.uint8)
        form = (n, dtype, fmt, scaling)
        got = kernels.narrow_decode(codes.to(where), scales.to(where), *form)
        assert same_bits(got.cpu(), narrow_oracle.narrow_decode(codes, scales, *form))


def assert_integers(kernels: ModuleType, x: torch.Tensor, bits: int, seed: int, where: str, targets=FLOATS) -> None:
    """Units, lows, steps and what they decode to."""
    encoded = kernels.int_encode(x.to(where), bits, seed)
    expected = integer_oracle.int_encode(x, bits, seed)
    assert all(same_bits(got.cpu(), want) for got, want in zip(encoded, expected, strict=True))
    for dtype in targets:
        decoded = kernels.int_decode(*encoded, x.numel(), dtype, bits)
        assert same_bits(decoded.cpu(), integer_oracle.int_decode(*expected, x.numel(), dtype, bits))
