"""Running sums of sparse storage's counts in the interpreter; the kernels around them are PTX (tests/aot)."""

import pytest
import torch

from gistkit.kernels.sparse.ends import FEW, ends
from gistkit.kernels.sparse.spill import group_slots, spill_origin
from tests.support.tensors import same_bits


@pytest.mark.parametrize("slots", (1, 1023, 2051, FEW + 1))
def test_ends_are_running_sums(slots):
    counts = torch.randint(0, 1025, (slots,)).to(torch.int16)
    counts[::3] = 0
    counts[-1] = 1024
    expected = counts.cumsum(0, dtype=torch.int64)
    assert same_bits(ends(counts), expected)


@pytest.mark.parametrize(
    "stride, slots, dtype",
    [(1024, 1, torch.float32), (256, 37, torch.uint8), (1024, 1025, torch.bfloat16)],
)
def test_ends_are_redirected_where_a_groups_last_one_is_past_the_capacity(stride, slots, dtype):
    """By the distance between array and spill, whichever comes first."""
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
