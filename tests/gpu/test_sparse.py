"""zvc and csr on a CUDA device against the oracle on CPU tensors, bit for bit; large, odd, empty, unaligned."""

import pytest
import torch

from gistkit.kernels import ops
from gistkit.kernels.reference import sparse as reference
from gistkit.kernels.reference import sparse_blocks as block_reference
from gistkit.kernels.sparse.ends import ends, ends_and_heads
from tests.gpu.sparse_on_device import LENGTHS, make_case, on_device
from tests.gpu.waiting import no_synchronisation
from tests.support.sparse_cases import EMPTY, PAYLOADS, SparseCase, decoded, relu_gradient
from tests.support.tensors import FLOATS, bits, float_values, plain_nan, same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec", PAYLOADS)
@pytest.mark.parametrize("fmt", ("raw", "fp16", "fp10", "fp8"))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", LENGTHS)
def test_encoding_equals_the_oracle(codec, fmt, dtype, n):
    case = make_case(n, dtype, fmt, "none")
    stride = 1024 if codec == "zvc" else 256
    made = getattr(ops, f"{codec}_encode")(case.x.cuda(), fmt)
    expected = getattr(reference, f"{codec}_encode")(case.x, fmt)
    counts = expected[1] if codec == "zvc" else expected[0]
    total = int(counts.sum())
    for a, b in zip(made, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if b.numel() == stride * counts.numel():
            a, b = ops.compact(a, counts.cuda(), stride, total), reference.compact(b, counts, stride, total)
        assert same_bits(a.cpu(), b)


@pytest.mark.parametrize("codec", PAYLOADS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zeros", (0.0, 0.1, 0.5, 0.9, 0.99, 1.0))
@pytest.mark.parametrize("n", (5_000_000, 20_000_003))
def test_raw_round_trip_of_many_elements(n, codec, dtype, zeros):
    x = float_values(n, dtype, 6, zeros, False).cuda()
    case = SparseCase(x, x, "raw", "none")
    for payload in PAYLOADS[codec](ops, case):
        assert same_bits(decoded(ops, case, payload, codec), x)
        passes = (bits(x) != 0) & ~((x == 0) & x.signbit())
        assert same_bits(relu_gradient(ops, case, payload, codec), torch.where(passes, x, 0))


@pytest.mark.parametrize("codec", PAYLOADS)
def test_every_pattern_of_16_bits(codec):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    case = SparseCase(x, x, "raw", "none")
    for payload in PAYLOADS[codec](ops, case):
        assert same_bits(decoded(ops, case, payload, codec), x)


# below the upper 16 bits of an fp32: both sides of every tie of fp8 and fp10 (at 0), of fp16 (odd multiples of 0x1000)
LOWER_HALVES = (0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0xEFFF, 0xF000, 0xF001, 0xFFFF)


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """Every pattern of 16 bits, for fp32 every upper half before LOWER_HALVES, in order and shuffled.

    With ties, both ends of the range, the least value that is not flushed, infinities and NaN of both signs among them.
    """
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype == torch.float32:
        x = torch.cat([(x << 16) | low for low in LOWER_HALVES])
    x = torch.cat((x, x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0))]))
    return x.view(dtype) if dtype == torch.float32 else x.to(torch.int16).view(dtype)


@pytest.mark.parametrize("codec", PAYLOADS)
@pytest.mark.parametrize("fmt", ("fp16", "fp10", "fp8"))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("unaligned", (0, 1))
def test_every_pattern_becomes_the_oracles_code(codec, fmt, dtype, unaligned):
    """In all places of a word; unaligned, a kernel that loads item by item."""
    stride = 1024 if codec == "zvc" else 256
    x = every_pattern(dtype)
    there = torch.cat((x[:unaligned], x)).cuda()[unaligned:]
    made, expected = getattr(ops, f"{codec}_encode")(there, fmt), getattr(reference, f"{codec}_encode")(x, fmt)
    counts = expected[1] if codec == "zvc" else expected[0]
    for a, b in zip(made, expected, strict=True):
        if b.numel() == stride * counts.numel():
            total = int(counts.sum())
            a, b = ops.compact(a, counts.cuda(), stride, total), reference.compact(b, counts, stride, total)
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("codec", PAYLOADS)
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
    structure = (index, counts) if codec == "zvc" else (counts, index)
    payload = (*structure, values, bytes_each)
    moved = torch.cat((values[:unaligned], values)).cuda()[unaligned:]
    there = (*on_device(structure), moved, bytes_each.cuda())
    decode = f"{codec}_decode"
    made = getattr(ops, decode)(*there, n, dtype, fmt, scaling, True)
    assert same_bits(made.cpu(), getattr(reference, decode)(*payload, n, dtype, fmt, scaling, True))


@pytest.mark.parametrize("codec", PAYLOADS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_values_need_not_be_aligned(codec, dtype):
    x = float_values(5001, dtype, 0, 0.5, False).cuda()[1:]
    case = SparseCase(x, x, "raw", "none")
    for payload in PAYLOADS[codec](ops, case):
        assert same_bits(decoded(ops, case, payload, codec), x)


@pytest.mark.parametrize("codec", PAYLOADS)
def test_more_elements_than_31_bits_count(codec):
    """2**31 + 5000 elements of bf16 (4 GiB): addresses, offsets and the packed arrays all pass 2**31."""
    x = torch.zeros(2**31 + 5000, dtype=torch.bfloat16, device="cuda")
    x[::7] = 1.5
    x[-1] = -0.0
    payload_of = ops.zvc_encode if codec == "zvc" else ops.csr_encode
    payload = (*payload_of(x, "raw"), EMPTY.cuda())
    decode = ops.zvc_decode if codec == "zvc" else ops.csr_decode
    assert torch.equal(
        decode(*payload, x.numel(), x.dtype, "raw", "none", False).view(torch.int16), x.view(torch.int16)
    )
    x.fill_(-2.5)
    words_or_counts, second, third = payload_of(x, "raw")
    counts = second if codec == "zvc" else words_or_counts
    stride = 1024 if codec == "zvc" else 256
    third = ops.compact(third, counts, stride, x.numel())
    if codec == "csr":
        second = ops.compact(second, counts, stride, x.numel())
    again = decode(words_or_counts, second, third, EMPTY.cuda(), x.numel(), x.dtype, "raw", "none", True)
    assert torch.equal(again, x)


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


@pytest.mark.parametrize("fmt", ("fp16", "fp8"))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("longest", (3, 30, 256))
@pytest.mark.parametrize("unaligned", (0, 1))
def test_packing_blocks_equals_the_oracle(fmt, dtype, longest, unaligned):
    """Blocks with exponents of their own, of items of one slot or of many, empty slots between them."""
    counts = (torch.randint(0, longest + 1, (5000,)) * (torch.rand(5000) > 0.3)).to(torch.int16)
    total = int(counts.sum())
    columns = torch.randint(0, 256, (5000 * 256,), dtype=torch.uint8)
    for stride in (256, 1024):
        n = 5000 * stride
        x = plain_nan((float_values(n, dtype, 8, 0.0, False) * torch.exp2(torch.arange(n) // 50 % 13)).to(dtype))
        there = torch.cat((x[:unaligned], x)).cuda()[unaligned:]
        made = ops.compact_blocks(there, counts.cuda(), stride, total, fmt)
        for a, b in zip(made, block_reference.compact_blocks(x, counts, stride, total, fmt), strict=True):
            assert torch.equal(a.cpu(), b)
        if stride == 256:
            made = ops.csr_compact_blocks(columns.cuda(), there, counts.cuda(), total, fmt)
            expected = block_reference.csr_compact_blocks(columns, x, counts, total, fmt)
            for a, b in zip(made, expected, strict=True):
                assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("slots", (1, 1024, 16_384, 16_385, 3_000_000))
def test_running_sums(slots):
    counts = torch.randint(0, 1025, (slots,)).to(torch.int16)
    counts[::3] = 0
    counts[-1] = 1024
    expected = counts.cumsum(0, dtype=torch.int64)
    places = torch.arange(0, int(expected[-1]), 1024)
    made, heads = ends_and_heads(counts.cuda(), places.numel(), 1024)
    assert torch.equal(made.cpu(), expected) and torch.equal(ends(counts.cuda()).cpu(), expected)
    assert torch.equal(heads.cpu().long(), torch.searchsorted(expected, places, right=True))


@pytest.mark.parametrize("codec, first, n", [("zvc", 0, 5), ("zvc", 1, 1003), ("csr", 0, 3), ("csr", 1, 515)])
def test_a_part_that_ends_inside_a_group_is_cut_there(codec, first, n):
    x = float_values(2048, torch.float32, 6, 0.0, False)
    case = SparseCase(x, x, "raw", "none")
    name, slot = ("zvc_decode_slots", 1024) if codec == "zvc" else ("csr_decode_rows", 256)
    for payload in PAYLOADS[codec](reference, case):
        there = on_device(payload)
        made = getattr(ops, name)(*there[:4], first, n, x.dtype, *there[4:])
        assert same_bits(made.cpu(), x[slot * first :][:n])


@pytest.mark.parametrize("codec", PAYLOADS)
def test_nothing_waits_for_the_device(codec):
    x = float_values(100_000, torch.float32, 0, 0.5, False).cuda()
    none = EMPTY.cuda()
    with no_synchronisation():
        encoded = getattr(ops, f"{codec}_encode")(x, "raw")
        getattr(ops, f"{codec}_decode")(*encoded, none, x.numel(), x.dtype, "raw", "none", False)
        getattr(ops, f"{codec}_relu_backward")(x, *encoded, none, "raw", "none", False)
        counts = encoded[1] if codec == "zvc" else encoded[0]
        ops.compact(encoded[2], counts, 1024 if codec == "zvc" else 256, x.numel())
        ops.compact_blocks(encoded[2], counts, 1024 if codec == "zvc" else 256, x.numel(), "fp8")


def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x = float_values(5000, torch.float32, 0, 0.5, False).to("cuda:1")
    case = SparseCase(x, x, "raw", "none")
    for codec, payloads in PAYLOADS.items():
        for payload in payloads(ops, case):
            moved = tuple(p.to("cuda:1") if isinstance(p, torch.Tensor) else p for p in payload)
            assert same_bits(decoded(ops, case, moved, codec), x)
