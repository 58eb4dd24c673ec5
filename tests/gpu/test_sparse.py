"""zvc and csr on a CUDA device against the oracle on CPU tensors, bit for bit; large, odd, empty, unaligned."""

import pytest
import torch

from gistkit.kernels import STRIDES, ops
from gistkit.kernels.reference import sparse as reference
from tests.support.sparse_cases import (
    EMPTY,
    PAYLOADS,
    SCALED,
    UNSCALED,
    SparseCase,
    decoded,
    relu_gradient,
    sparse_case,
)
from tests.support.tensors import FLOATS, float_values, same_bits, sixteen_bit_values

BOTH = pytest.mark.parametrize("codec", STRIDES)
LENGTHS = (1, 31, 1000, 1023, 1025, 3 * 1024, 1_000_003)
# below the upper 16 bits of an fp32: both sides of every tie of fp8 and fp10 (at 0), of fp16 (odd multiples of 0x1000)
LOWER_HALVES = (0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0xEFFF, 0xF000, 0xF001, 0xFFFF)


def same_encoding(codec: str, made: tuple, expected: tuple) -> bool:
    """Structure equal, values and columns as far as the counts go."""
    stride, counts, equal = STRIDES[codec], expected[1], True
    for a, b in zip(made, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if b.numel() == stride * counts.numel():
            total = int(counts.sum())
            a, b = ops.compact(a, counts.cuda(), stride, total), reference.compact(b, counts, stride, total)
        equal &= same_bits(a.cpu(), b)
    return equal


@BOTH
@pytest.mark.parametrize("fmt, scaling", UNSCALED + SCALED)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", LENGTHS)
def test_kernels_equal_the_oracle(codec, fmt, scaling, dtype, n):
    case = sparse_case(float_values(n, dtype, 2, 0.5, False), float_values(n, dtype, 4, 0.1, False), fmt, scaling)
    there = SparseCase(case.x.cuda(), case.grad.cuda(), fmt, scaling)
    encode = f"{codec}_encode"
    if scaling == "none":
        assert same_encoding(codec, getattr(ops, encode)(there.x, fmt), getattr(reference, encode)(case.x, fmt))
    for payload in PAYLOADS[codec](reference, case):
        moved = tuple(p.cuda() if isinstance(p, torch.Tensor) else p for p in payload)
        assert same_bits(decoded(ops, there, moved, codec).cpu(), decoded(reference, case, payload, codec))
        gradient = relu_gradient(ops, there, moved, codec)
        assert same_bits(gradient.cpu(), relu_gradient(reference, case, payload, codec))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of 16 bits, for fp32 every upper half before LOWER_HALVES, in order and shuffled.

    With ties, both ends of the range, the least value that is not flushed, infinities and NaN of both signs among them.
    """
    x = sixteen_bit_values(dtype, LOWER_HALVES)
    return torch.cat((x, x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]))


@BOTH
@pytest.mark.parametrize("fmt", ("fp16", "fp10", "fp8"))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("unaligned", (0, 1))
def test_every_pattern_becomes_the_oracles_code(codec, fmt, dtype, unaligned):
    """In all places of a word; unaligned, a kernel that loads item by item."""
    x = every_pattern(dtype)
    there = torch.cat((x[:unaligned], x)).cuda()[unaligned:]
    encode = f"{codec}_encode"
    assert same_encoding(codec, getattr(ops, encode)(there, fmt), getattr(reference, encode)(x, fmt))


@BOTH
@pytest.mark.parametrize("fmt, bits", (("fp8", 8), ("fp10", 10), ("fp16", 16)))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scaling", ("none", "block"))
@pytest.mark.parametrize("unaligned", (0, 1))
def test_every_code_decodes_as_the_oracle_has_it(codec, fmt, bits, dtype, scaling, unaligned):
    """Every code, NaN and infinities that no encoder writes too, under every exponent byte (fp16: some of them)."""
    exponents = torch.arange(9 if fmt == "fp8" else 16, 256, 40 if fmt == "fp16" else 1)
    codes = torch.arange(2**bits).repeat(exponents.numel()).to(torch.uint8 if fmt == "fp8" else torch.int16)
    n, slot = codes.numel(), 1024 if codec == "zvc" else 256
    counts = torch.full((n // slot,), slot, dtype=torch.int16)
    n = counts.numel() * slot
    values = ops.fp10_pack(codes[:n]) if fmt == "fp10" else codes[:n]
    bytes_each = exponents.to(torch.uint8).repeat_interleave(2**bits // 128) if scaling == "block" else EMPTY
    index = torch.full((n // 32,), -1, dtype=torch.int32) if codec == "zvc" else torch.arange(n).to(torch.uint8)
    payload = (index, counts, values, bytes_each)
    moved = torch.cat((values[:unaligned], values)).cuda()[unaligned:]
    there = (index.cuda(), counts.cuda(), moved, bytes_each.cuda())
    decode, form = f"{codec}_decode", (n, dtype, fmt, scaling, True)
    assert same_bits(getattr(ops, decode)(*there, *form).cpu(), getattr(reference, decode)(*payload, *form))


@BOTH
def test_more_elements_than_31_bits_count(codec):
    """2**31 + 5000 elements of bf16 (4 GiB): addresses, offsets and the packed arrays all pass 2**31."""
    x = torch.zeros(2**31 + 5000, dtype=torch.bfloat16, device="cuda")
    x[::7] = 1.5
    x[-1] = -0.0
    encode, decode, none = getattr(ops, f"{codec}_encode"), getattr(ops, f"{codec}_decode"), EMPTY.cuda()
    form = (x.numel(), x.dtype, "raw", "none")
    assert torch.equal(decode(*encode(x, "raw"), none, *form, False).view(torch.int16), x.view(torch.int16))
    x.fill_(-2.5)
    index, counts, values = encode(x, "raw")
    values = ops.compact(values, counts, STRIDES[codec], x.numel())
    if codec == "csr":
        index = ops.compact(index, counts, STRIDES[codec], x.numel())
    assert torch.equal(decode(index, counts, values, none, *form, True), x)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8))
@pytest.mark.parametrize("stride", (256, 1024))
@pytest.mark.parametrize("longest", (3, 30, 256))
def test_packing_equals_the_oracle(dtype, stride, longest):
    """Runs that end in the same slot, in the next and several on, and empty slots between them."""
    counts = (torch.randint(0, longest + 1, (5000,)) * (torch.rand(5000) > 0.3)).to(torch.int16)
    scratch = torch.randint(0, 256, (5000 * stride,)).to(dtype)
    columns = torch.randint(0, 256, (5000 * stride,), dtype=torch.uint8)
    total = int(counts.sum())
    there = counts.cuda()
    made = ops.compact(scratch.cuda(), there, stride, total)
    assert torch.equal(made.cpu(), reference.compact(scratch, counts, stride, total))
    if stride == 256:
        pair = ops.csr_compact(columns.cuda(), scratch.cuda(), there, total)
        for a, b in zip(pair, reference.csr_compact(columns, scratch, counts, total), strict=True):
            assert torch.equal(a.cpu(), b)


def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x = float_values(5000, torch.float32, 0, 0.5, False).to("cuda:1")
    case = SparseCase(x, x, "raw", "none")
    for codec, payloads in PAYLOADS.items():
        for payload in payloads(ops, case):
            moved = tuple(p.to("cuda:1") if isinstance(p, torch.Tensor) else p for p in payload)
            assert same_bits(decoded(ops, case, moved, codec), x)
