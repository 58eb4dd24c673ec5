"""The compiled kernels of zvc and csr, run by tests/support/warp.py, against the oracle bit for bit.

Triton's interpreter has no inline assembly, of which these kernels are made; this is what a GPU runs, but for what
ptxas makes of it. tests/gpu/test_sparse.py has the last word.
"""

import numpy as np
import pytest
import torch

from gistkit.formats import ceil_div
from gistkit.kernels.reference import sparse as reference
from gistkit.kernels.reference import sparse_blocks as block_reference
from gistkit.kernels.sparse.arguments import BIT_DTYPES, STRIDES, bits_of
from gistkit.kernels.sparse.compact import CSR_SLOTS, UNBOUNDED, ZVC_SLOTS
from gistkit.kernels.sparse.spill import columns_start, group_slots, spill_bytes, spill_origin
from tests.aot.test_sparse import BACKWARDS, ENCODERS, PROGRAM, READERS, block_packer, compiled, packer
from tests.support.sparse_cases import EMPTY, PAYLOADS, SparseCase, decoded, relu_gradient, sparse_case
from tests.support.tensors import float_values, plain_nan
from tests.support.warp import bases, launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BOTH = pytest.mark.parametrize("codec", PAYLOADS)


def array(x: torch.Tensor) -> np.ndarray:
    bits = x if x.dtype == torch.int64 else bits_of(x)
    return bits.numpy().copy() if x.numel() else np.zeros(16, np.uint8)


def make_case(n: int, dtype: str, fmt: str, scaling: str, zeros: float) -> SparseCase:
    x = float_values(n, DTYPES[dtype], 3, zeros, False)
    x[5::97] = -0.0
    return sparse_case(x, float_values(n, DTYPES[dtype], 4, 0.1, False), fmt, scaling)


def encodes(codec: str, case: SparseCase, dtype: str, wide: bool) -> None:
    """Structure equal; values and columns equal as far as the counts go."""
    expected, n = getattr(reference, f"{codec}_encode")(case.x, case.fmt), case.x.numel()
    made = [np.full_like(array(e), 1) for e in expected]
    index, counts, values = made[0].view(np.uint8), *made[1:]
    structure = [index, counts] if codec == "zvc" else [counts, index]
    code = compiled(ENCODERS[codec], dtype, fmt=case.fmt, wide=wide)
    launch(code.ptx, [array(case.x), *structure, values, n], ceil_div(n, PROGRAM))
    stride, total = STRIDES[codec], int(expected[1].sum())
    for got, want in zip(made, expected, strict=True):
        if want.numel() == stride * counts.size:
            scratch = torch.from_numpy(got).view(want.dtype)
            got, want = (reference.compact(t, expected[1], stride, total) for t in (scratch, want))
        assert np.array_equal(array(got) if isinstance(got, torch.Tensor) else got, array(want))


@BOTH
@pytest.mark.parametrize("dtype, fmt, wide", [
    ("bf16", "raw", True),
    ("fp32", "raw", True),
    ("bf16", "fp8", True),
    ("fp32", "fp8", False),
    ("fp16", "fp10", True),
    ("bf16", "fp16", True),
])  # fmt: skip
def test_encoding(codec, dtype, fmt, wide):
    """The last slot is short, and not wide, elements are loaded one by one."""
    encodes(codec, make_case(3080 if wide else 2003, dtype, fmt, "none", 0.5), dtype, wide)


def check(codec: str, case: SparseCase, dtype: str, packed: bool, wide: bool, first: int = 0) -> None:
    """Decoding from slot ``first`` on, and ReLU's backward of the whole."""
    payload = next(p for p in PAYLOADS[codec](reference, case) if p[-1] == packed)
    index, counts, values, exponents = payload[:4]
    n, plane, stride = case.x.numel(), values.numel(), STRIDES[codec]
    octets = array(index).view(np.uint8)
    close = [array(counts), array(counts.cumsum(0, dtype=torch.int64) if packed else counts)]
    for kernel, before, after in (
        (READERS[codec], [], [array(exponents)]),
        (BACKWARDS[codec], [array(case.grad)], []),
    ):
        begin = 0 if before else first
        slots = [part[begin:] for part in close]
        structure = [octets[begin * 128 :], *slots] if codec == "zvc" else [*slots, octets]
        out = np.full_like(array(case.x[begin * stride :]), -1)
        code = compiled(kernel, dtype, fmt=case.fmt, scaling=case.scaling, packed=packed, wide=wide)
        spill, columns_at = ([], []) if codec == "zvc" else ([array(EMPTY)], [0])
        arguments = [out, *before, *structure, array(values), *after, *spill, out.size, plane, *columns_at]
        launch(code.ptx, arguments, ceil_div(out.size, PROGRAM))
        expected = (
            relu_gradient(reference, case, payload, codec) if before else decoded(reference, case, payload, codec)
        )
        assert np.array_equal(out, array(expected[begin * stride :]))
        if before:  # the gradient that is read is the one that is written
            arguments[:2] = [before[0], bases([])[0]]
            launch(code.ptx, arguments, ceil_div(n, PROGRAM))
            assert np.array_equal(before[0], array(expected))


@BOTH
@pytest.mark.parametrize("dtype, fmt, scaling, zeros", [
    ("bf16", "raw", "none", 0.5),
    ("fp32", "raw", "none", 0.97),
    ("bf16", "fp8", "block", 0.0),
    ("bf16", "fp10", "none", 0.3),
    ("bf16", "fp10", "block", 0.6),
    ("fp32", "fp16", "none", 1.0),
])  # fmt: skip
def test_packed(codec, dtype, fmt, scaling, zeros):
    """The last program is short; fp10's planes end inside of rows, and its eight programs do not go in order."""
    n = 7176 if fmt == "fp10" else 3080
    check(codec, make_case(n, dtype, fmt, scaling, zeros), dtype, packed=True, wide=True)


@BOTH
def test_scratch(codec):
    check(codec, make_case(2056, "bf16", "fp10", "none", 0.5), "bf16", packed=False, wide=True)


@BOTH
def test_a_part_from_a_later_slot_on(codec):
    """Offsets into packed arrays are absolute: a launch over some slots needs nothing but their own counts and ends."""
    check(
        codec,
        make_case(3080, "bf16", "fp8", "block", 0.4),
        "bf16",
        packed=True,
        wide=True,
        first=1 if codec == "zvc" else 5,
    )


@pytest.mark.parametrize("codec, dtype", [("zvc", "bf16"), ("zvc", "fp32"), ("csr", "bf16")])
def test_items_one_by_one(codec, dtype):
    """What is not aligned, or of a length that is no multiple of 8."""
    check(codec, make_case(1101, dtype, "raw", "none", 0.5), dtype, packed=True, wide=False)


def redirected(counts: torch.Tensor, stride: int, capacity: int, distance: int) -> np.ndarray:
    """The slots' ends, on by ``distance`` items and less by the origin where their group's last one is too far."""
    ends, group = counts.cumsum(0, dtype=torch.int64), group_slots(stride)
    last = ends[torch.clamp(torch.arange(counts.numel()) // group * group + group, max=counts.numel()) - 1]
    return array(ends + torch.where(last > capacity, distance - spill_origin(capacity), 0))


def check_spilled(codec: str, case: SparseCase, dtype: str, capacity: int, spill_first: bool) -> None:
    """Payload and spill by the oracle, ends redirected as these lie in the emulated memory."""
    n, stride = case.x.numel(), STRIDES[codec]
    index, counts, scratch = getattr(reference, f"{codec}_encode")(case.x, case.fmt)
    whole, item = counts.numel() * stride, scratch.element_size()
    spill = torch.full((spill_bytes(whole, capacity, item, codec == "csr"),), 7, dtype=torch.uint8)
    if codec == "zvc":
        values = reference.compact(scratch, counts, stride, capacity, spill)
    else:
        index, values = reference.csr_compact(index, scratch, counts, capacity, spill)
    payload = (index, counts, values, EMPTY)
    for kernel, before, after in ((READERS[codec], [], [EMPTY]), (BACKWARDS[codec], [case.grad], [])):
        out, behind = np.full_like(array(case.x), -1), np.zeros(0, np.uint8)
        if spill_first:
            # the first array's memory holds the spill as well: distances are negative
            behind = np.zeros(512 - out.nbytes % 512, np.uint8)
            behind = np.concatenate((behind, array(spill)))
        room = np.concatenate((out.view(np.uint8), behind)).view(out.dtype)
        octets, ends = array(index).view(np.uint8), array(counts.long())
        structure = [octets, array(counts), ends] if codec == "zvc" else [array(counts), ends, octets]
        arrays = [room, *map(array, before), *structure, array(values), *map(array, after)]
        at = bases([*arrays, array(spill)])
        spill_at = at[0] + room.nbytes - spill.numel() if spill_first else at[-2]
        ends[:] = redirected(counts, stride, capacity, (spill_at - at[len(before) + 4]) // item)
        # zvc's kernels are those of any packed array, and know of no spill: it is only there
        numbers = [n, 0] if codec == "zvc" else [spill_at, n, capacity, columns_start(whole, capacity, item)]
        ptx = compiled(kernel, dtype, fmt=case.fmt, spill=True).ptx
        launch(ptx, [*arrays, *numbers, array(spill)], ceil_div(n, PROGRAM))
        form = (case.fmt, "none", True, spill)
        expected = (relu_gradient if before else decoded)(reference, case, (*payload, *form), codec)
        assert np.array_equal(room[:n], array(expected))


@BOTH
@pytest.mark.parametrize(
    "dtype, fmt, room, spill_first",
    [
        ("bf16", "raw", 0.99, True),
        ("fp32", "fp8", 0.99, False),
    ],
)
def test_spilled(codec, dtype, fmt, room, spill_first):
    """A group of 8192 in the arrays or not, and a short one: programs read one or the other, from one pointer each."""
    case = make_case(9000, dtype, fmt, "none", 0.6)
    capacity = max(ceil_div(int((bits_of(case.x) != 0).sum() * room), 8) * 8, 8)
    check_spilled(codec, case, dtype, capacity, spill_first)


def test_packing_csr_with_a_spill():
    """To the byte what the oracle writes to the spill, and before it to the arrays."""
    case = make_case(9000, "bf16", "raw", "none", 0.6)
    columns, counts, scratch = reference.csr_encode(case.x, "raw")
    whole, item = counts.numel() * 256, scratch.element_size()
    capacity = max(ceil_div(int((bits_of(case.x) != 0).sum() * 0.99), 8) * 8, 8)
    spill = torch.full((spill_bytes(whole, capacity, item, True),), 7, dtype=torch.uint8)
    made = [np.full(capacity, 9, np.uint8), np.full(capacity, 9, array(scratch).dtype), array(spill)]
    ends = array(counts.long())
    arrays = [array(columns), array(scratch), array(counts), ends, *made]
    at = bases(arrays)
    ends[:] = redirected(counts, 256, capacity, (at[6] - at[5]) // item)
    numbers = [UNBOUNDED, counts.numel(), capacity, columns_start(whole, capacity, item)]
    ptx = packer(90, item, CSR_SLOTS, columns=True, spill=True, total="i64").ptx
    launch(ptx, [*arrays, *numbers], ceil_div(counts.numel(), CSR_SLOTS))
    expected = reference.csr_compact(columns, scratch, counts, capacity, spill)
    inside = int(counts[:32].sum())
    assert np.array_equal(made[2], array(spill))
    assert all(np.array_equal(a[:inside], array(b)[:inside]) for a, b in zip(made, expected, strict=False))


# runs of neighbours that end in the same slot, in the next, several slots on, and where a program's slots end
COUNTS = {
    1024: [1000, 0, 3, 1, 0, 1, 2, 1024, 7, 9, 0, 0, 1, 5, 64, 31, 0],
    256: [256, 0, 1, 31, 32, 33, 64, 65, 0, 255, 100, 3, 1, 1, 0, 2, *[7] * 17, 0, 5, 256],
}


@pytest.mark.parametrize("item_bytes, stride, columns, missing", [
    (4, 1024, False, 0),
    (2, 1024, False, 70),
    (2, 256, True, 1),
    (4, 256, True, 70),
])  # fmt: skip
def test_compact_never_writes_past_the_total(item_bytes, stride, columns, missing):
    """More slots than a program has; a total short of the end writes no further."""
    counts = torch.tensor(COUNTS[stride], dtype=torch.int16)
    n, total, slots = counts.numel() * stride, int(counts.sum()), ZVC_SLOTS if stride == 1024 else CSR_SLOTS
    scratches = [torch.randint(0, 100, (n,)).to(d) for d in (torch.uint8, BIT_DTYPES[item_bytes])]
    made = [np.full(total + 64, 101, array(scratch).dtype) for scratch in scratches]
    ends = array(counts.cumsum(0, dtype=torch.int64))
    beside = 0 if columns else 1
    arrays = [array(scratches[beside]), array(scratches[1]), array(counts), ends, made[beside], made[1], array(EMPTY)]
    ptx = packer(90, item_bytes, slots, columns).ptx
    launch(ptx, [*arrays, total - missing, counts.numel(), 0, 0], ceil_div(counts.numel(), slots))
    for got, scratch in list(zip(made, scratches, strict=True))[beside:]:
        assert np.array_equal(
            got[: total - missing], array(reference.compact(scratch, counts, stride, total))[: total - missing]
        )
        assert (got[total - missing :] == 101).all()


def drawn_counts(stride: int, slots: int, density: float) -> torch.Tensor:
    """Empty slots and full ones among others, more slots than a warp looks at together."""
    counts = np.random.default_rng(slots).binomial(stride, density, slots).astype(np.int16)
    counts[::7], counts[3:5] = 0, stride
    return torch.from_numpy(counts)


def pack_arguments(counts: torch.Tensor, total: int) -> tuple[list[np.ndarray], list[int], int]:
    """(counts, ends, heads), (total, slots), programs."""
    ends = counts.cumsum(0, dtype=torch.int64)
    places = torch.arange(0, max(total, 1), 1024)
    heads = torch.searchsorted(ends, places, right=True).to(torch.int32)
    return [array(counts), array(ends), array(heads)], [total, counts.numel()], places.numel()


@pytest.mark.parametrize("dtype, stride", [("bf16", 1024), ("fp32", 256)])
def test_packing_fp8_blocks(dtype, stride):
    counts = drawn_counts(stride, 24 if stride == 256 else 6, 0.3)
    n, total = counts.numel() * stride, int(counts.sum())
    # smaller than what shared memory holds at first, which must not count in a block that is not full
    values = plain_nan(float_values(n, DTYPES[dtype], 2, 0.0, False) * torch.exp2(torch.arange(n) // 50 % 13 - 90))
    values = values.to(DTYPES[dtype])
    codes, exponents = (np.full(size, 1, np.uint8) for size in (total, ceil_div(total, 128)))
    structure, numbers, programs = pack_arguments(counts, total)
    launch(block_packer(dtype, "fp8", stride).ptx, [array(values), *structure, codes, exponents, *numbers], programs)
    expected = block_reference.compact_blocks(values, counts, stride, total, "fp8")
    assert np.array_equal(codes, array(expected[0])) and np.array_equal(exponents, array(expected[1]))
