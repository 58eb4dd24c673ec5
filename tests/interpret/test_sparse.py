"""The Triton kernels of zvc and csr in the interpreter against the oracle, bit for bit.

The interpreter takes 0.1 s a slot here: it rewrites every jitted helper at each call, and a slot is 32 rows. Hence few
and short inputs; tests/kernels/test_sparse.py holds the oracle to the definition on many more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from gistkit.formats import ceil_div
from gistkit.kernels.reference import ranges as range_oracle
from gistkit.kernels.reference import sparse as reference
from gistkit.kernels.reference import sparse_blocks as block_oracle
from gistkit.kernels.sparse import blocks as sparse_blocks
from gistkit.kernels.sparse import operators as kernels
from gistkit.kernels.sparse import ranges
from gistkit.kernels.sparse.arguments import BIT_DTYPES
from gistkit.kernels.sparse.compact import CSR_SLOTS, PIECES, RUN, ZVC_SLOTS, compact_kernel
from gistkit.kernels.sparse.ends import FEW, ends, ends_and_heads
from tests.support.sparse_cases import (
    PAYLOADS,
    SCALED,
    UNSCALED,
    SparseCase,
    decoded,
    relu_gradient,
    sparse_case,
    sparse_cases,
)
from tests.support.tensors import FLOATS, float_values, plain_nan, same_bits

# a scaled product past the largest float is infinite, quietly on a GPU, and clamped next; numpy warns
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")

STRIDES = {"zvc": 1024, "csr": 256}


@contextmanager
def guarded_empty(fill: float) -> Iterator[list[torch.Tensor]]:
    """What lies behind every flat fp32 tensor that a launcher allocates: 2048 elements, filled."""
    room: list[torch.Tensor] = []

    def empty(size, *, dtype, device):
        (n,) = size
        whole = torch.full((n + 2048,), fill, dtype=dtype, device=device)
        room.append(whole[n:])
        return whole[:n]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.torch, "empty", empty)
        yield room


def check_encode(case: SparseCase, codec: str) -> None:
    """Structure equal; values and columns equal as far as the counts go."""
    made = getattr(kernels, f"{codec}_encode")(case.x, case.fmt)
    expected = getattr(reference, f"{codec}_encode")(case.x, case.fmt)
    stride = STRIDES[codec]
    counts = made[1] if codec == "zvc" else made[0]
    for a, b in zip(made, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.numel() == stride * counts.numel():
            total = int(counts.sum())
            a, b = kernels.compact(a, counts, stride, total), reference.compact(b, counts, stride, total)
        assert same_bits(a, b)


def check_decode(case: SparseCase, codec: str, payloads) -> None:
    for payload in payloads:
        assert same_bits(decoded(kernels, case, payload, codec), decoded(reference, case, payload, codec))
        gradients = (relu_gradient(k, case, payload, codec) for k in (kernels, reference))
        assert same_bits(*gradients)


@pytest.mark.parametrize("codec", STRIDES)
@given(case=sparse_cases(longest=1100, formats=UNSCALED))
@settings(max_examples=10)
def test_encoding_equals_the_oracle(codec, case):
    check_encode(case, codec)


@pytest.mark.parametrize("codec", STRIDES)
@given(case=sparse_cases(longest=1100))
@settings(max_examples=10)
def test_decoding_and_relu_backward_equal_the_oracle(codec, case):
    check_decode(case, codec, PAYLOADS[codec](reference, case))


@pytest.mark.parametrize("fmt, scaling", UNSCALED + SCALED)
@pytest.mark.parametrize("codec", STRIDES)
def test_every_format(codec, fmt, scaling):
    dtype = FLOATS[len(fmt + scaling) % 3]
    case = sparse_case(float_values(1025, dtype, 2, 0.5, False), torch.ones(1025, dtype=dtype), fmt, scaling)
    check_decode(case, codec, PAYLOADS[codec](reference, case)[:1])
    if scaling == "none":
        check_encode(case, codec)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("codec", STRIDES)
def test_negative_zeros_stop_a_gradient(codec, dtype):
    x = torch.tensor([1.0, -0.0, 0.0, torch.nan, -torch.nan, 3.0], dtype=dtype)
    case = SparseCase(x, torch.full((6,), 7.0, dtype=dtype), "raw", "none")
    payload = PAYLOADS[codec](reference, case)[0]
    assert relu_gradient(kernels, case, payload, codec).tolist() == [7, 0, 0, 7, 7, 7]


@pytest.mark.parametrize("codec", STRIDES)
def test_block_exponents_go_by_packed_places(codec):
    """Values that double every 40 elements: every block of 128 has its own exponent, and slots start inside blocks."""
    x = float_values(1100, torch.float32, 1, 0.4, False) * torch.exp2(torch.arange(1100) // 40)
    case = SparseCase(x, x, "fp8", "block")
    payload = PAYLOADS[codec](reference, case)[0]
    assert len(set(payload[3].tolist())) == payload[3].numel()
    assert same_bits(decoded(kernels, case, payload, codec), decoded(reference, case, payload, codec))


@pytest.mark.parametrize("codec", STRIDES)
def test_packed_planes_that_end_inside_a_slot(codec):
    """Inside of a row too, and of seven programs, which do not go in order: the last one is left over."""
    x = float_values(6200, torch.float32, 1, 0.6, False)
    case = sparse_case(x, x, "fp10", "none")
    check_decode(case, codec, PAYLOADS[codec](reference, case)[:1])


@pytest.mark.parametrize("codec", STRIDES)
def test_the_values_need_not_be_aligned(codec):
    x = float_values(700, torch.bfloat16, 0, 0.5, False)[1:]
    check_encode(SparseCase(x, x, "raw", "none"), codec)


COUNTS = {
    # runs of neighbours that end in the same slot, in the next, several slots on, and where a program's slots end
    1024: [1000, 0, 3, 1, 0, 1, 2, 1024, 7, 9, 0, 0, 1, 5, 64, 31, 0],
    256: [256, 0, 1, 31, 32, 33, 64, 65, 0, 255, 100, 3, 1, 1, 0, 2, *[7] * 17, 0, 5, 256],
}


@pytest.mark.parametrize("item_bytes", (1, 2, 4))
@pytest.mark.parametrize("stride", COUNTS)
@pytest.mark.parametrize("missing", (0, 1, 70))
def test_compact_equals_the_oracle_and_never_writes_past_the_total(item_bytes, stride, missing):
    """More slots than a program has; a total short of the end writes no further."""
    counts = torch.tensor(COUNTS[stride], dtype=torch.int16)
    scratch = torch.randint(0, 100, (counts.numel() * stride,)).to(BIT_DTYPES[item_bytes])
    total = int(counts.sum())
    expected = reference.compact(scratch, counts, stride, total)
    room = torch.full((total + 64,), 101, dtype=scratch.dtype)
    slots = ZVC_SLOTS if stride == 1024 else CSR_SLOTS
    arguments = (scratch, counts, ends(counts), room, total - missing, counts.numel())
    shape: dict[str, Any] = {"STRIDE": stride, "SLOTS": slots, "RUN": RUN[item_bytes], "PIECES": PIECES[item_bytes]}
    shape |= {"ASM": 0, "num_warps": 1}
    compact_kernel[(ceil_div(counts.numel(), slots),)](*arguments, **shape)
    assert torch.equal(room[: total - missing], expected[: total - missing])
    assert bool((room[total - missing :] == 101).all())


BLOCK_COUNTS = {
    # more slots than a warp looks at together, empty ones, full ones, and some in which a program's places end
    1024: [1000, 0, 3, 1, 0, 1, 2, 1024, 7, 9, *[0] * 40, 1, 5, 64, 31, 0],
    256: COUNTS[256] * 2,
}


@pytest.mark.parametrize("fmt", ("fp16", "fp8"))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stride", COUNTS)
def test_packing_blocks_equals_the_oracle(stride, dtype, fmt):
    """Blocks with exponents of their own that go across slots and end inside of them; the last one is short."""
    counts = torch.tensor(BLOCK_COUNTS[stride], dtype=torch.int16)
    n = counts.numel() * stride
    x = plain_nan(float_values(n, dtype, 7, 0.0, False) * torch.exp2(torch.arange(n) // 50 % 13).to(dtype))
    total = int(counts.sum())
    if stride == 1024:
        made = sparse_blocks.compact_blocks(x, counts, stride, total, fmt)
        expected = block_oracle.compact_blocks(x, counts, stride, total, fmt)
    else:
        columns = torch.randint(0, 256, (n,), dtype=torch.uint8)
        made = sparse_blocks.csr_compact_blocks(columns, x, counts, total, fmt)
        expected = block_oracle.csr_compact_blocks(columns, x, counts, total, fmt)
    for a, b in zip(made, expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("slots", (1, 1023, 1024, 2051, FEW + 1))
def test_ends_are_running_sums_and_heads_the_slots_of_multiples(slots):
    counts = torch.randint(0, 1025, (slots,)).to(torch.int16)
    counts[::3] = 0
    counts[-1] = 1024
    expected = counts.cumsum(0, dtype=torch.int64)
    places = torch.arange(0, int(expected[-1]), 1024)
    made, heads = ends_and_heads(counts, places.numel(), 1024)
    assert same_bits(made, expected) and same_bits(ends(counts), expected)
    assert heads.tolist() == torch.searchsorted(expected, places, right=True).tolist()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8))
@pytest.mark.parametrize("missing", (0, 70))
def test_csr_compact_equals_the_oracle(dtype, missing):
    counts = torch.tensor(COUNTS[256], dtype=torch.int16)
    columns = torch.randint(0, 256, (counts.numel() * 256,), dtype=torch.uint8)
    values = torch.randint(0, 256, (counts.numel() * 256,)).to(dtype)
    total = int(counts.sum())
    expected = reference.csr_compact(columns, values, counts, total)
    made = kernels.csr_compact(columns, values, counts, total - missing)
    for a, b in zip(made, expected, strict=True):
        assert torch.equal(a, b[: total - missing])


@pytest.mark.parametrize("dtype", FLOATS)
def test_csr_of_full_empty_and_short_rows(dtype):
    """Rows of 256, 0 and 3 stored elements; lengths in whole 8-byte words and not, so that both kinds of loads run."""
    for n in (600, 601):
        x = float_values(n, dtype, 5, 0.0, False)
        x[256:512] = 0
        x[515:] = 0
        case = SparseCase(x, x, "raw", "none")
        check_encode(case, "csr")
        check_decode(case, "csr", PAYLOADS["csr"](reference, case))


@pytest.mark.parametrize("codec", STRIDES)
def test_everything_stored(codec):
    """1024 of a slot, 256 of every row: the largest numbers that the scans' fields hold."""
    x = torch.ones(1024, dtype=torch.bfloat16)
    case = SparseCase(x, x, "raw", "none")
    check_encode(case, codec)
    check_decode(case, codec, PAYLOADS[codec](reference, case)[:1])


@pytest.mark.parametrize(
    "codec, first, n", [("zvc", 0, 5), ("zvc", 1, 1003), ("csr", 0, 3), ("csr", 1, 515), ("csr", 3, 257)]
)
def test_a_part_that_ends_inside_a_group_is_cut_there(codec, first, n):
    """Everything is stored, so that a slot or a row written out whole would end past the result."""
    x = float_values(2048, torch.float32, 6, 0.0, False)
    case = SparseCase(x, x, "raw", "none")
    name = "zvc_decode_slots" if codec == "zvc" else "csr_decode_rows"
    expected = x[STRIDES[codec] * first :][:n]
    for payload in PAYLOADS[codec](reference, case):
        arguments = (*payload[:4], first, n, x.dtype, *payload[4:])
        assert same_bits(getattr(range_oracle, name)(*arguments), expected)
        with guarded_empty(7.0) as room:
            assert same_bits(getattr(ranges, name)(*arguments), expected)
        assert all(bool((guard == 7.0).all()) for guard in room)


def test_nothing_to_do():
    x = torch.empty((0,))
    words, counts, values = kernels.zvc_encode(x, "raw")
    assert words.numel() == counts.numel() == values.numel() == kernels.compact(values, counts, 1024, 0).numel() == 0
    none = torch.empty((0,), dtype=torch.uint8)
    assert kernels.zvc_decode(words, counts, values, none, 0, x.dtype, "raw", "none", True).shape == (0,)
    assert kernels.csr_decode(*kernels.csr_encode(x, "raw"), none, 0, x.dtype, "raw", "none", False).shape == (0,)
