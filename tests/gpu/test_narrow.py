"""Narrow-float kernels on a CUDA device against the oracle on CPU tensors, to the bit."""

from __future__ import annotations

import pytest
import torch

from gistkit.formats import FLOAT_FORMATS, SCALINGS
from gistkit.kernels import ops
from gistkit.kernels.reference import narrow as reference
from tests.gpu.waiting import no_synchronisation
from tests.support.narrow_values import boundaries
from tests.support.tensors import FLOATS, same_bits, values_of

pytestmark = pytest.mark.gpu
ENCODE = {"fp16": ops.fp16_encode, "fp10": ops.fp10_encode, "fp8": ops.fp8_encode}
DECODE = {"fp16": ops.fp16_decode, "fp10": ops.fp10_decode, "fp8": ops.fp8_decode}
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
formats = pytest.mark.parametrize("fmt", FLOAT_FORMATS)
scalings = pytest.mark.parametrize("scaling", SCALINGS)


def assert_equals_oracle(x: torch.Tensor, fmt: str, scaling: str, targets: tuple[torch.dtype, ...] = FLOATS) -> None:
    codes, exponents = ENCODE[fmt](x, scaling)
    device_codes, device_exponents = ENCODE[fmt](x.cuda(), scaling)
    assert torch.equal(device_exponents.cpu(), exponents)
    assert torch.equal(device_codes.cpu(), codes)
    for dtype in targets:
        decoded = DECODE[fmt](device_codes, device_exponents, x.numel(), dtype, scaling)
        assert same_bits(decoded.cpu(), DECODE[fmt](codes, exponents, x.numel(), dtype, scaling))


@dtypes
@formats
@scalings
@pytest.mark.parametrize("n", [0, 1, 2, 127, 128, 2**20, 2**20 + 16, 3 * 2**20 + 5, 2**23])
def test_kernels_equal_the_oracle(fmt, scaling, dtype, n):
    for seed in (0, 4):
        assert_equals_oracle(values_of(n, dtype, seed, 0.2, seed == 4), fmt, scaling, (dtype,))


@dtypes
@formats
@scalings
def test_every_sixteen_bit_value(fmt, scaling, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    x = (x << 16).view(torch.float32) if dtype == torch.float32 else x.to(torch.int16).view(dtype)
    assert_equals_oracle(x, fmt, scaling)


@formats
@scalings
def test_every_code_its_neighbours_and_every_tie(fmt, scaling):
    assert_equals_oracle(boundaries(FLOAT_FORMATS[fmt]), fmt, scaling)


@dtypes
def test_every_code_decodes_as_the_oracle_does(dtype):
    codes = {
        "fp8": (torch.arange(256).to(torch.uint8), 256),
        "fp10": (reference.fp10_pack(torch.arange(1024).to(torch.int16)), 1024),
        "fp16": (torch.arange(-(2**15), 2**15).to(torch.int16), 2**16),
    }
    for fmt, (packed, n) in codes.items():
        for exponent in (None, *range(FLOAT_FORMATS[fmt].max_exponent + 1, 256)):
            scaling = "none" if exponent is None else "tensor"
            byte = torch.tensor([] if exponent is None else [exponent], dtype=torch.uint8)
            got = DECODE[fmt](packed.cuda(), byte.cuda(), n, dtype, scaling)
            assert same_bits(got.cpu(), DECODE[fmt](packed, byte, n, dtype, scaling))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 3 * 2**20, 2**20 + 1])
def test_fp10_pack(n):
    codes = torch.randint(0, 1024, (n,)).to(torch.int16)
    assert torch.equal(ops.fp10_pack(codes.cuda()).cpu(), ops.fp10_pack(codes))


@formats
@scalings
def test_the_host_never_waits(fmt, scaling):
    x = torch.randn(2**20, device="cuda")
    DECODE[fmt](*ENCODE[fmt](x, scaling), x.numel(), x.dtype, scaling)
    with no_synchronisation():
        DECODE[fmt](*ENCODE[fmt](x, scaling), x.numel(), x.dtype, scaling)


@pytest.mark.parametrize("scaling", ["none", "block"])
def test_more_than_two_to_the_31_elements(scaling):
    n = 2**31 + 1024
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs 17 GB of device memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-1024:] = torch.randn(1024, dtype=torch.bfloat16, device="cuda")
    codes, exponents = ENCODE["fp8"](x, scaling)
    tail = x[-1024:].cpu()
    expected = ENCODE["fp8"](tail, scaling)
    assert torch.equal(codes[-1024:].cpu(), expected[0])
    decoded = DECODE["fp8"](codes, exponents, n, torch.bfloat16, scaling)
    assert same_bits(decoded[-1024:].cpu(), DECODE["fp8"](*expected, 1024, torch.bfloat16, scaling))
    assert not decoded[:4096].any()
