"""Machine code of zvc and csr: no spills, no barriers where lanes vote, instructions per element within the budget.

Budgets of FACTS: 36 instructions per element keep an fp32 copy memory-bound on an H200, 18 a bf16 one; an encoder or a
ReLU backward moves more bytes an element than it costs there, and has 21. What is measured is held a little above.

Encoders convert what is stored in a loop of 256 elements a round: they are held to four rounds, the cost where
everything is stored. zvc's decoder and backward have no loop: all of it is listed, five octets a lane for what may
start inside one. csr's readers have a loop: the listing is what runs up to a density of 0.49 (fp10: 0.24), and at 0.5 a
third octet a lane runs, if for few lanes. Policies take csr only where it is smaller than zvc, below 0.125.

On sm_80 fp8 is converted by integers. An A100 has 0.58 / 0.4 = 1.45 times as many instructions a byte as an H200 (see
tests/aot/test_pool.py), so 26 in place of 18 and 30 in place of 21.
"""

import pytest
import triton.language as tl

from gistkit.kernels.sparse.compact_kernels import compact_kernel
from gistkit.kernels.sparse.csr_kernels import csr_decode_kernel, csr_encode_kernel
from gistkit.kernels.sparse.ends import COUNTS_A_ROUND, GROUP, SUMS_A_ROUND, ends_kernel
from gistkit.kernels.sparse.operators import CSR_PIECES, CSR_ROWS, CSR_SLOTS, PAIR_PIECES, PIECES, RUN, ZVC_SLOTS
from gistkit.kernels.sparse.spill import group_slots
from gistkit.kernels.sparse.zvc_kernels import zvc_decode_kernel, zvc_encode_kernel
from tests.aot.harness import Compiled, assert_wide_addresses, compile_kernel, loop_body, loops, per_element

DTYPE = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
CODES = {"fp16": "*i16", "fp10": "*i16", "fp8": "*u8"}
ITEMS = {1: "*u8", 2: "*i16", 4: "*i32"}
PROGRAM = 1024  # elements
READERS = {"zvc": zvc_decode_kernel, "csr": csr_decode_kernel}


def compiled(
    kernel, dtype: str, capability: int = 90, fmt="raw", scaling="none", spill=False, grad=False
) -> Compiled:  # fmt: skip
    name = kernel.fn.__name__
    bits = "*i32" if dtype == "fp32" else "*i16"
    values = bits if fmt == "raw" else "*i32" if fmt == "fp10" and "encode" not in name else CODES[fmt]
    x = f"*{dtype}" if "decode" in name and fmt != "raw" and not grad else bits
    kinds = {
        **{"x_ptr": x, "values_ptr": values, "counts_ptr": "*i16", "columns_ptr": "*u8"},
        **{"ends_ptr": "*i64", "exponents_ptr": "*u8", "n": "i32", "plane": "i32"},
        **{"marks_ptr": "*u8", "spill_ptr": "*u8", "columns_at": "i32", "out_ptr": x},
        "grad_ptr": bits if grad else "*i16",
    }
    settings = {"FMT": fmt, "SCALING": scaling, "PACKED": True, "DTYPE": DTYPE[dtype], "ASM": capability}
    settings |= {"WIDE": True, "WHOLE": True, "PIECES": CSR_PIECES[fmt], "SPILL": spill}
    settings |= {"GRAD": grad, "GRAD_WIDE": grad}
    constexprs = {a: settings[a] for a in kernel.arg_names if a in settings}
    signature = {a: kinds[a] for a in kernel.arg_names if a not in settings}
    c = compile_kernel(kernel, signature, constexprs, capability, num_warps=1)
    assert (c.stack_bytes, c.shared_bytes) == (0, 0)
    if fmt != "fp10":  # whose programs take slots a third of all apart
        assert_wide_addresses(c)
    return c


def at_half_density(c: Compiled, pieces: int) -> float:
    """An element's of a reader of csr where half is stored: two octets a lane, and a third that a run reaches into."""
    body = loop_body(c)
    end = len(body) + next(i for i in range(len(c.sass_lines)) if c.sass_lines[i : i + len(body)] == body)
    skipped = 0
    if pieces == 2:
        labels = dict(c.labels)
        branches = [
            (i, labels.get(line[line.find(".L") : -1], 0)) for i, line in enumerate(c.sass_lines) if "BRA" in line
        ]
        skipped = max(target - i - 1 for i, target in branches if end - len(body) < i < target <= end)
    return (len(c.sass_lines) + len(body) * 2 // pieces - skipped) * 32 / PROGRAM


def _instructions(c: Compiled) -> float:
    """An element's where everything is stored: a loop that is not unrolled runs once for 256 elements."""
    body = loop_body(c) if loops(c) else ()
    return (len(c.sass_lines) + 3 * len(body)) * 32 / PROGRAM


@pytest.mark.parametrize("kernel, capability, dtype, fmt, scaling, budget", [
    (zvc_decode_kernel, 90, "fp32", "raw", "none", 17),
    (zvc_decode_kernel, 90, "bf16", "raw", "none", 15),
    (zvc_decode_kernel, 90, "bf16", "fp8", "none", 14),
    (zvc_decode_kernel, 90, "bf16", "fp10", "block", 20),
    (zvc_decode_kernel, 90, "bf16", "fp16", "block", 17),
    (zvc_decode_kernel, 100, "bf16", "fp8", "block", 16),
    (zvc_encode_kernel, 80, "bf16", "raw", "none", 15),
    (zvc_encode_kernel, 90, "bf16", "raw", "none", 15),
    (zvc_encode_kernel, 90, "fp32", "raw", "none", 17),
    (zvc_encode_kernel, 100, "bf16", "raw", "none", 15),
    (zvc_encode_kernel, 80, "bf16", "fp8", "none", 24),
    (zvc_encode_kernel, 90, "bf16", "fp10", "none", 17),
    (zvc_encode_kernel, 90, "bf16", "fp16", "none", 15),
    (zvc_encode_kernel, 90, "fp32", "fp8", "none", 16),
], ids=lambda v: getattr(v, "__name__", v))  # fmt: skip
def test_kernels_that_vote(kernel, capability, dtype, fmt, scaling, budget):
    """Of a narrow decoder the listing counts five octets a lane, of which the fifth is skipped but where a full slot
    starts inside one."""
    c = compiled(kernel, dtype, capability, fmt, scaling)
    # 32 programs of one warp fill an SM only if a lane needs no more than 64 registers
    assert c.barriers == 0 and c.registers <= 64
    assert _instructions(c) <= budget
    assert kernel is zvc_encode_kernel or not loops(c)
    if kernel is zvc_encode_kernel and fmt == "raw":
        assert c.loads == c.loads_128 == loads_before_a_store(c) == (8 if dtype == "fp32" else 4)


def loads_before_a_store(c: Compiled) -> int:
    first_store = next(i for i, line in enumerate(c.sass_lines) if "STG" in line or "STS" in line)
    return sum("LDG" in line for line in c.sass_lines[:first_store])


@pytest.mark.parametrize("capability, dtype, fmt, budget", [
    (80, "bf16", "fp8", 25),
    (90, "fp32", "raw", 14),
    (90, "bf16", "raw", 11),
    (90, "bf16", "fp10", 18),
    (100, "bf16", "fp8", 15),
])  # fmt: skip
def test_csr_encode_stores_whole_octets(capability, dtype, fmt, budget):
    c = compiled(csr_encode_kernel, dtype, capability, fmt)
    assert c.barriers == 0
    assert per_element(c, PROGRAM, 1) <= budget
    item_bytes = 4 if dtype == "fp32" else 2
    stored_bytes = 1 if fmt == "fp8" else item_bytes
    assert c.stores == CSR_ROWS * (1 + max(1, stored_bytes // 2)) + 1, "8 or 16 bytes a lane, and the counts"
    assert c.loads == c.loads_128 == loads_before_a_store(c) == CSR_ROWS * item_bytes // 2


@pytest.mark.parametrize("capability, dtype, fmt, scaling, listed, half", [
    (90, "fp32", "raw", "none", 11, 15),
    (80, "bf16", "fp8", "none", 14, 20),
    (90, "bf16", "fp8", "block", 13, 18),
    (90, "fp32", "fp10", "block", 12, 25),
    (100, "bf16", "fp10", "block", 10, 20),
])  # fmt: skip
def test_csr_decode(capability, dtype, fmt, scaling, listed, half):
    c = compiled(csr_decode_kernel, dtype, capability, fmt, scaling)
    assert c.barriers == 0 and c.registers <= 64
    assert per_element(c, PROGRAM, 1) <= listed
    assert at_half_density(c, CSR_PIECES[fmt]) <= half
    assert c.stores == c.stores_128 == 4 * (2 if dtype == "fp32" else 1)


@pytest.mark.parametrize("codec, capability, dtype, fmt, budget", [
    ("csr", 80, "bf16", "raw", 16),
    ("csr", 90, "fp32", "raw", 16),
    ("csr", 100, "bf16", "raw", 16),
    ("zvc", 90, "fp32", "fp10", 19),
    ("csr", 90, "bf16", "fp10", 17),
    ("zvc", 90, "bf16", "fp8", 12),
    ("zvc", 90, "bf16", "raw", 15),
])  # fmt: skip
def test_relu_backward_decodes_nothing(codec, capability, dtype, fmt, budget):
    c = compiled(READERS[codec], dtype, capability, fmt, grad=True)
    wide = 4 * (2 if dtype == "fp32" else 1)
    # 21 programs an SM, of which each has its 2 or 4 KiB of gradients in flight; 32 where items are read as they are
    assert c.barriers == 0 and c.registers <= (64 if (codec, fmt) == ("zvc", "raw") else 96)
    assert per_element(c, PROGRAM, 1) <= budget
    if codec == "csr":
        assert at_half_density(c, CSR_PIECES[fmt]) <= 21
    else:
        assert not loops(c)
    assert c.stores == c.stores_128 == wide
    assert c.count("F2F") == c.count("HADD2") == c.count("F2FP") == 0


def packer(
    capability: int, item_bytes: int, slots: int, columns: bool = False, spill: bool = False, total="i32"
) -> Compiled:
    kind, run = ITEMS[item_bytes], RUN[item_bytes]
    beside = "*u8" if columns else kind
    kinds = dict.fromkeys(("values_ptr", "packed_ptr"), kind) | dict.fromkeys(
        ("columns_ptr", "packed_columns_ptr"), beside
    )
    kinds |= {"counts_ptr": "*i16", "ends_ptr": "*i64", "spill_ptr": "*u8" if spill else kind, "total": total}
    kinds |= dict.fromkeys(("slots", "capacity", "columns_at"), "i32")
    constexprs = {"STRIDE": 256 if slots == CSR_SLOTS else 1024, "SLOTS": slots, "RUN": run, "COLUMNS": columns}
    constexprs |= {"PIECES": (PAIR_PIECES if columns else PIECES)[item_bytes], "SPILL": spill}
    c = compile_kernel(compact_kernel, kinds, constexprs, capability, num_warps=1)
    assert (c.stack_bytes, c.barriers, c.shared_bytes) == (0, 0, 0) and c.registers <= 80
    return c


@pytest.mark.parametrize("capability, item_bytes, slots, columns, budget", [
    (80, 2, ZVC_SLOTS, False, 23),
    (90, 4, ZVC_SLOTS, False, 26),
    (90, 4, CSR_SLOTS, True, 50),
    (100, 2, CSR_SLOTS, True, 45),
])  # fmt: skip
def test_compact(capability, item_bytes, slots, columns, budget):
    """Half of a budget is for runs of more than two slots, which are seldom."""
    c = packer(capability, item_bytes, slots, columns)
    pieces = (PAIR_PIECES if columns else PIECES)[item_bytes]
    if columns:
        assert c.stores == 2 * pieces + 2, "whole words, and the items at the ends"
    else:
        assert c.stores_128 == pieces and c.stores == pieces + 1, "16 bytes a lane, and the items at the ends"
    assert per_element(loop_body(c), 32 * RUN[item_bytes] * pieces, 1) <= budget


@pytest.mark.parametrize("stride, few", [(0, True), (256, True), (1024, False)])
def test_running_sums(stride, few):
    """With a spill 128 threads have a MiB of elements, or a quarter of one: 600 instructions are 0.3 an element."""
    kinds = {"counts_ptr": "*i16", "before_ptr": "*i16" if few else "*i32", "ends_ptr": "*i64"}
    kinds |= {"values_ptr": "*i16", "spill_ptr": "*u8", "total_ptr": "*i64"}
    kinds |= dict.fromkeys(("n", "capacity"), "i32")
    shape = {"EACH": GROUP, "ROUND": COUNTS_A_ROUND} if few else {"EACH": 1, "ROUND": SUMS_A_ROUND}
    settings = {"GROUP": GROUP, "SPILL": group_slots(stride) if stride else 0, "TOTAL": stride > 0, **shape}
    c = compile_kernel(ends_kernel, kinds, settings, 90, num_warps=4)
    assert c.stack_bytes == 0 and c.registers <= 128
    assert c.loads_128 >= (4 if few else 1) and c.stores_128 >= 4
    assert not stride or c.instructions <= 600
