"""The compiled kernels of zvc and csr, run by tests/support/warp.py, against the oracle bit for bit.

Triton's interpreter has no inline assembly, of which these kernels are made; this is what a GPU runs, but for what
ptxas makes of it. tests/gpu/test_sparse.py has the last word.
"""

import numpy as np
import pytest
import torch

from gistkit.formats import ceil_div
from gistkit.kernels import STRIDES, bits_of
from gistkit.kernels.layout import BIT_DTYPES
from gistkit.kernels.reference import sparse as reference
from gistkit.kernels.sparse.operators import CSR_SLOTS, UNBOUNDED, ZVC_SLOTS
from gistkit.kernels.sparse.spill import columns_start, group_slots, spill_bytes, spill_origin
from tests.aot.test_sparse import BACKWARDS, PROGRAM, READERS, compiled, packer
from tests.support.sparse_cases import EMPTY, PAYLOADS, SparseCase, decoded, relu_gradient, sparse_case
from tests.support.tensors import float_values
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
@pytest.mark.parametrize("dtype, fmt, room, spill_first", [("bf16", "raw", 0.99, True), ("fp32", "fp8", 0.99, False)])
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
