"""Narrow floats on CPU tensors: every code, every tie, PyTorch's own formats, scales, error bounds, bad arguments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gistkit.formats import FLOAT_FORMATS, SCALE_BLOCK, SCALINGS, FloatFormat
from gistkit.kernels import ops
from gistkit.kernels.reference import narrow as reference
from tests.support.narrow_values import boundaries, expected_codes, expected_exponent, scale_of, table
from tests.support.tensors import FLOATS, same_bits, sixteen_bit_values, values_of

QUIET_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
formats = pytest.mark.parametrize("f", FLOAT_FORMATS.values(), ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def unpacked(codes: torch.Tensor, n: int, f: FloatFormat) -> torch.Tensor:
    """int64 codes, one an element, sign included, not negative."""
    each = reference.fp10_unpack(codes, n) if f.name == "fp10" else codes
    return each.long() & ((1 << f.bits) - 1)


def codes_of(x: torch.Tensor, f: FloatFormat, scaling: str = "none") -> torch.Tensor:
    return unpacked(ops.narrow_encode(x, f.name, scaling)[0], x.numel(), f)


@formats
def test_every_code_its_neighbours_and_every_tie(f):
    x = boundaries(f)
    assert torch.equal(codes_of(x, f), expected_codes(x, f))


@dtypes
@formats
def test_every_sixteen_bit_value(f, dtype):
    x = sixteen_bit_values(dtype)
    assert torch.equal(codes_of(x, f), expected_codes(x, f))


@formats
def test_ends_of_the_range(f):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([0.0, -0.0, inf, -inf, nan, 3e38, -3e38, 1e-45, -1e-45, f.max_finite * 1.001])
    x = torch.cat((x, torch.tensor([-1], dtype=torch.int32).view(torch.float32)))  # NaN of the other sign
    top, sign = f.max_code, 1 << (f.bits - 1)
    expected = [0, sign, top, top | sign, f.nan_code, top, top | sign, 0, sign, top, f.nan_code | sign]
    assert codes_of(x, f).tolist() == expected


@dtypes
@formats
def test_decoding_every_code(f, dtype):
    codes = torch.arange(1 << f.bits)
    x = reference.from_codes(codes, f.name, dtype)
    magnitude = codes & ((1 << (f.bits - 1)) - 1)
    finite = magnitude <= f.max_code
    expected = table(f, True)[magnitude.clamp(max=f.max_code)].to(dtype)
    expected = torch.where(codes >> (f.bits - 1) == 1, -expected, expected)
    assert same_bits(x[finite], expected[finite])
    assert torch.equal(x.isnan(), magnitude >= f.first_nan_code)
    assert torch.equal(x.isinf(), ~finite & (magnitude < f.first_nan_code))
    pattern = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
    nan = pattern[magnitude == f.nan_code].tolist()
    width = torch.finfo(dtype).bits
    assert nan == [QUIET_NAN[dtype], QUIET_NAN[dtype] - (1 << (width - 1))]


@dtypes
@formats
@given(n=st.integers(1, 400), seed=st.integers(0, 9999))
def test_scaled_codes_and_exponents_by_definition(f, dtype, n, seed):
    x = values_of(n, dtype, seed, 0.2, seed % 5 == 0)
    codes, exponents = ops.narrow_encode(x, f.name, "block")
    each = unpacked(codes, n, f)
    for i, start in enumerate(range(0, n, SCALE_BLOCK)):
        block = x[start : start + SCALE_BLOCK]
        assert exponents[i].item() == expected_exponent(block, f)
        scale = scale_of(exponents[i].item(), f)
        assert torch.equal(each[start : start + SCALE_BLOCK], expected_codes(block, f, scale))


@formats
def test_blocks_without_finite_values(f):
    x = torch.cat((torch.zeros(128), torch.full((128,), torch.inf), torch.full((128,), torch.nan), -torch.zeros(1)))
    codes, exponents = ops.narrow_encode(x, f.name, "block")
    assert exponents.tolist() == [127] * 4
    got = ops.narrow_decode(codes, exponents, x.numel(), torch.float32, f.name, "block")
    assert torch.equal(got[:128], x[:128]) and torch.signbit(got[-1])
    assert (got[128:256] == f.max_finite * scale_of(127, f)).all() and got[256:384].isnan().all()


@formats
@pytest.mark.parametrize("scaling", SCALINGS)
def test_working_blocks_join_without_a_seam(f, scaling, monkeypatch):
    x = values_of(2000, torch.float32, 0, 0.1, False)
    whole = ops.narrow_encode(x, f.name, scaling)
    back = ops.narrow_decode(*whole, 2000, torch.float32, f.name, scaling)
    monkeypatch.setattr(reference, "BLOCK", 256)
    again = ops.narrow_encode(x, f.name, scaling)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert same_bits(ops.narrow_decode(*again, 2000, torch.float32, f.name, scaling), back)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 300, 1001])
def test_fp10_words_lie_in_planes(n):
    codes = torch.randint(0, 1024, (n,), generator=torch.Generator().manual_seed(n)).to(torch.int16)
    words = ops.fp10_pack(codes).long()
    size = len(words)
    for i, code in enumerate(codes.tolist()):
        assert words[i % size] >> 10 * (i // size) & 1023 == code
    held = sum(int(code) << 10 * (i // size) for i, code in enumerate(codes.tolist()))
    assert words.sum() == held, "bits that belong to no element are 0"
    assert torch.equal(reference.fp10_unpack(words.to(torch.int32), n), codes)
    x = values_of(n, torch.float32, 0, 0.1, False)
    assert torch.equal(ops.narrow_encode(x, "fp10", "none")[0], ops.fp10_pack(reference.to_codes(x, "fp10")))
