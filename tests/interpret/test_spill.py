"""Packing with a spill and reading it back in the interpreter, against the oracle bit for bit.

Redirected ends are distances in memory: the interpreter hands the tensors' own addresses to kernels, so what holds
between an array and a spill on a device holds between two allocations here, whichever comes first. A slot takes 0.1 s.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gistkit.formats import ceil_div
from gistkit.kernels.reference import sparse as reference
from gistkit.kernels.sparse import operators as kernels
from gistkit.kernels.sparse import ranges
from gistkit.kernels.sparse.arguments import bits_of
from gistkit.kernels.sparse.ends import FEW, ends
from gistkit.kernels.sparse.spill import GROUP, group_slots, spill_origin
from tests.support.sparse_cases import EMPTY, SparseCase, sparse_case
from tests.support.tensors import float_values, same_bits

STRIDES = {"zvc": 1024, "csr": 256}
UNTOUCHED = 0x5A


@pytest.mark.parametrize("stride", STRIDES.values())
@pytest.mark.parametrize(
    "slots, dtype", [(1, torch.float32), (37, torch.uint8), (1025, torch.bfloat16), (FEW + 100, torch.float32)]
)
def test_ends_are_redirected_where_a_groups_last_one_is_past_the_capacity(stride, slots, dtype):
    counts = torch.randint(0, stride + 1, (slots,)).to(torch.int16)
    counts[slots // 2 :: 3] = 0
    plain, group = counts.cumsum(0, dtype=torch.int64), group_slots(stride)
    last = plain[torch.clamp(torch.arange(slots) // group * group + group, max=slots) - 1]
    # at which a group still fits and no longer does, and around that
    for capacity in {8, max(int(last[slots // 2]) - 1, 1), max(int(last[slots // 2]), 1), slots * stride}:
        room = torch.empty(2 * 10**6 + 64, dtype=torch.uint8)
        for values, spill in ((room[:64], room[10**6 :]), (room[10**6 :], room[:64])):
            values = values[: values.numel() // 64 * 64].view(dtype)
            # the array's length is its capacity; the kernel only asks where it begins
            array = torch.as_strided(values, (1,), (1,)).expand(max(capacity, 1))
            distance = (spill.data_ptr() - values.data_ptr()) // dtype.itemsize - spill_origin(capacity)
            expected = plain + torch.where(last > capacity, distance, 0)
            assert same_bits(ends(counts, stride, array, spill), expected)


@contextmanager
def allocating_in(arena: torch.Tensor) -> Iterator[None]:
    """Flat tensors that launchers allocate lie in the arena, one behind the other."""
    used = 0

    def empty(size, *, dtype, device):
        nonlocal used
        made = arena[used : used + size[0] * dtype.itemsize].view(dtype)
        used += ceil_div(size[0] * dtype.itemsize, 512) * 512
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield


def packed(module, case: SparseCase, codec: str, capacity: int, spill: torch.Tensor):
    """The payload as a module packs the oracle's scratch."""
    if codec == "zvc":
        words, counts, scratch = getattr(reference, f"{codec}_encode")(case.x, case.fmt)
        return words, counts, module.compact(scratch, counts, 1024, capacity, spill), EMPTY
    counts, columns, scratch = getattr(reference, f"{codec}_encode")(case.x, case.fmt)
    columns, values = module.csr_compact(columns, scratch, counts, capacity, spill)
    return counts, columns, values, EMPTY


# a group of eight slots and one of one; room: what share of the stored elements the arrays have room for
CASES = [
    ("zvc", torch.float32, "raw", 0.99, True),
    ("zvc", torch.bfloat16, "fp8", 0.0, False),
    ("csr", torch.bfloat16, "raw", 0.99, False),
    ("csr", torch.float16, "fp8", 0.0, True),
]


@pytest.mark.parametrize("codec, dtype, fmt, room, spill_first", CASES)
def test_packing_and_reading_equal_the_oracles(codec, dtype, fmt, room, spill_first):
    n = GROUP + 1000
    case = sparse_case(float_values(n, dtype, 2, 0.4, False), float_values(n, dtype, 3, 0.1, False), fmt, "none")
    stored = int((bits_of(case.x) != 0).sum())
    capacity = max(ceil_div(int(stored * room), 8) * 8, 8)
    memory = torch.full((1 << 20,), UNTOUCHED, dtype=torch.uint8)
    near, far = (memory[-memory.data_ptr() % 512 :][start : start + (1 << 19) - 512] for start in (0, 1 << 19))
    spill, arena = (near, far) if spill_first else (far, near)
    run = torch.full_like(spill, UNTOUCHED)
    expected = packed(reference, case, codec, capacity, run)
    with allocating_in(arena):
        made = packed(kernels, case, codec, capacity, spill)
    assert torch.equal(spill, run), "no byte is touched but the items'"
    form = (fmt, "none", True)
    plain = getattr(reference, f"{codec}_decode")(*expected, n, dtype, *form, run)
    assert same_bits(getattr(reference, f"{codec}_decode")(*made, n, dtype, *form, spill), plain)
    name, first = ("zvc_decode_slots", 7) if codec == "zvc" else ("csr_decode_rows", 28)
    part = getattr(ranges, name)(*made, first, n - first * STRIDES[codec], dtype, *form, spill)
    assert same_bits(part, plain[first * STRIDES[codec] :]), "both sides of the border between array and spill"
    gradients = (getattr(m, f"{codec}_relu_backward")(case.grad, *made, *form, spill) for m in (kernels, reference))
    assert same_bits(*gradients)
