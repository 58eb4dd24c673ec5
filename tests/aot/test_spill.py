"""Machine code of sparse storage with a spill: what it costs over the variants without one.

Which are as they were: SPILL is a constexpr, and zvc's readers and the packing of one array are the very same kernels.
Budgets as in tests/aot/test_sparse.py, of the variants with a spill a little above what is measured.
"""

import pytest

from gistkit.kernels.sparse.compact import (
    CSR_SLOTS,
    PAIR_PIECES,
    PIECES,
    RUN,
    ZVC_SLOTS,
    compact_kernel,
    compact_pair_kernel,
)
from gistkit.kernels.sparse.csr_readers import csr_backward_kernel, csr_decode_kernel
from gistkit.kernels.sparse.ends import COUNTS_A_ROUND, GROUP, SUMS_A_ROUND, ends_kernel
from gistkit.kernels.sparse.spill import group_slots
from tests.aot.harness import Compiled, compile_kernel, loop_body, per_element
from tests.aot.test_sparse import ITEMS, PROGRAM, at_half_density, compiled

PAIR = {"columns_ptr": "*u8", "packed_columns_ptr": "*u8", "spill_ptr": "*u8", "counts_ptr": "*i16", "ends_ptr": "*i64"}


@pytest.mark.parametrize("kernel, capability, dtype, fmt, listed", [
    (csr_decode_kernel, 80, "bf16", "raw", 10),
    (csr_decode_kernel, 90, "bf16", "raw", 10),
    (csr_decode_kernel, 100, "bf16", "fp8", 11.5),
    (csr_backward_kernel, 90, "fp32", "raw", 15.5),
    (csr_backward_kernel, 100, "bf16", "raw", 12),
])  # fmt: skip
def test_csrs_readers_find_their_columns_for_a_few_instructions(kernel, capability, dtype, fmt, listed):
    plain, spilling = (compiled(kernel, dtype, capability, fmt, spill=spill) for spill in (False, True))
    # 32 lanes a program of 1024 elements: 20 scalar instructions are 0.63 an element
    assert spilling.instructions - plain.instructions <= 20
    assert spilling.barriers == 0 and spilling.registers <= plain.registers + 4
    assert per_element(spilling, PROGRAM, 1) <= listed
    assert at_half_density(spilling, 2) <= 21
    assert (spilling.stores, spilling.stores_128, spilling.loads_128) == (
        plain.stores,
        plain.stores_128,
        plain.loads_128,
    )


def packer(capability: int, item_bytes: int, spill: bool) -> Compiled:
    kind, run, pieces = ITEMS[item_bytes], RUN[item_bytes], PAIR_PIECES[item_bytes]
    kinds = PAIR | {"values_ptr": kind, "packed_values_ptr": kind, "total": "i64" if spill else "i32"}
    kinds |= dict.fromkeys(("slots", "capacity", "columns_at"), "i32")
    constexprs = {"STRIDE": 256, "SLOTS": CSR_SLOTS, "RUN": run, "PIECES": pieces, "SPILL": spill, "ASM": capability}
    return compile_kernel(compact_pair_kernel, kinds, constexprs, capability, num_warps=1)


@pytest.mark.parametrize(
    "capability, item_bytes, budget", [(80, 2, 45), (90, 4, 50), (90, 2, 45), (90, 1, 45), (100, 2, 45)]
)
def test_csr_compact(capability, item_bytes, budget):
    c, pieces = packer(capability, item_bytes, False), PAIR_PIECES[item_bytes]
    assert (c.spills, c.barriers, c.shared_bytes) == (0, 0, 0) and c.registers <= 80
    assert c.stores == 2 * pieces + 2, "whole words, and the items at the ends"
    assert per_element(loop_body(c), 32 * RUN[item_bytes] * pieces, 1) <= budget


@pytest.mark.parametrize("capability, item_bytes", [(80, 2), (90, 1), (90, 4)])
def test_packing_csr_is_the_same_loop(capability, item_bytes):
    plain, spilling = (packer(capability, item_bytes, spill) for spill in (False, True))
    assert spilling.spills == spilling.barriers == 0 and spilling.registers <= 80
    assert len(loop_body(spilling)) <= len(loop_body(plain)) + 2
    assert spilling.instructions - plain.instructions <= 24, "once for 32 rows"


@pytest.mark.parametrize("capability, item_bytes", [(90, 4)])
def test_a_total_of_64_bits_costs_zvcs_packing_nothing(capability, item_bytes):
    kind = ITEMS[item_bytes]
    kinds = {"scratch_ptr": kind, "packed_ptr": kind, "counts_ptr": "*i16", "ends_ptr": "*i64", "slots": "i32"}
    settings = {"STRIDE": 1024, "SLOTS": ZVC_SLOTS, "RUN": RUN[item_bytes], "PIECES": PIECES[item_bytes]}
    settings |= {"ASM": capability}
    plain, spilling = (
        compile_kernel(compact_kernel, kinds | {"total": total}, settings, capability, num_warps=1)
        for total in ("i32", "i64")
    )
    assert spilling.spills == 0 and spilling.instructions <= plain.instructions + 2
    assert per_element(loop_body(spilling), 32 * RUN[item_bytes] * PIECES[item_bytes], 1) <= 26


@pytest.mark.parametrize("capability, few, stride", [
    (80, True, 1024),
    (90, True, 256),
    (90, False, 1024),
    (100, False, 256),
])  # fmt: skip
def test_redirecting_ends(capability, few, stride):
    kinds = {"counts_ptr": "*i16", "before_ptr": "*i16" if few else "*i32", "ends_ptr": "*i64", "heads_ptr": "*i64"}
    kinds |= {"values_ptr": "*i16", "spill_ptr": "*u8", **dict.fromkeys(("n", "heads", "capacity"), "i32")}
    shape = {"EACH": GROUP, "ROUND": COUNTS_A_ROUND} if few else {"EACH": 1, "ROUND": SUMS_A_ROUND}
    c = compile_kernel(
        ends_kernel, kinds, {"GROUP": GROUP, "STEP": 0, "SPILL": group_slots(stride), **shape}, capability, num_warps=4
    )
    # 128 threads for a MiB of elements or a quarter of one: 600 instructions are 0.3 an element at most
    assert c.spills == 0 and c.registers <= 128 and c.instructions <= 600
    assert c.loads_128 >= (4 if few else 1) and c.stores_128 >= 4
