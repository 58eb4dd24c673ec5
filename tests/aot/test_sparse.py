"""Machine code of zvc and csr: no spills, no barriers where lanes vote, instructions per element within the budget.

Budgets of FACTS: 36 instructions per element keep an fp32 copy memory-bound on an H200, 18 a bf16 one; an encoder or a
ReLU backward moves more bytes an element than it costs there, and has 21. The lossy formats add their conversion; they
are held to what they cost, so that a change shows.
"""

import re

import pytest
import triton.language as tl

from gistkit.kernels.compact import CSR_SHAPE, ZVC_SHAPE, compact_kernel, compact_pair_kernel
from gistkit.kernels.csr_kernels import csr_backward_kernel, csr_decode_kernel, csr_encode_kernel
from gistkit.kernels.sparse import AHEAD, CSR_PIECES, CSR_ROWS
from gistkit.kernels.zvc_kernels import zvc_backward_kernel, zvc_decode_kernel, zvc_encode_kernel
from tests.aot.harness import CAPABILITIES, Compiled, compile_kernel, loop_body, per_element

BITS = {4: "*i32", 2: "*i16"}
FLOAT = {4: "*fp32", 2: "*bf16"}
DTYPE = {4: tl.float32, 2: tl.bfloat16}
CODES = {"fp16": "*i16", "fp10": "*i16", "fp8": "*u8"}
PROGRAM = 1024  # elements
VOTING = {"zvc encode": zvc_encode_kernel, "zvc decode": zvc_decode_kernel, "csr encode": csr_encode_kernel}


def _compiled(kernel, item_bytes: int, capability: int = 90, fmt="raw", scaling="none", packed=True) -> Compiled:
    name = kernel.fn.__name__
    values = BITS[item_bytes] if fmt == "raw" else "*i32" if fmt == "fp10" and "encode" not in name else CODES[fmt]
    x = FLOAT[item_bytes] if "decode" in name and fmt != "raw" else BITS[item_bytes]
    kinds = {
        **{"x_ptr": x, "values_ptr": values, "words_ptr": "*i32", "counts_ptr": "*i16", "columns_ptr": "*u8"},
        **{"ends_ptr": "*i64" if packed else "*i16", "exponents_ptr": "*u8", "n": "i32", "plane": "i32"},
        **dict.fromkeys(("grad_ptr", "out_ptr"), BITS[item_bytes]),
    }
    if kernel is csr_encode_kernel:
        kinds["x_ptr"] = "*i64"
    settings = {"FMT": fmt, "SCALING": scaling, "PACKED": packed, "DTYPE": DTYPE[item_bytes], "ASM": True}
    settings |= {"AHEAD": AHEAD[item_bytes], "ROWS": CSR_ROWS, "PIECES": CSR_PIECES, "WIDE": True}
    constexprs = {a: settings[a] for a in kernel.arg_names if a in settings}
    signature = {a: kinds[a] for a in kernel.arg_names if a not in settings}
    compiled = compile_kernel(kernel, signature, constexprs, capability, num_warps=1)
    assert (compiled.spills, compiled.shared_bytes) == (0, 0)
    return compiled


@pytest.mark.parametrize("item_bytes, budget", [(4, 36), (2, 21)])
@pytest.mark.parametrize(
    "kernel",
    (zvc_encode_kernel, zvc_decode_kernel, zvc_backward_kernel),
    ids=lambda k: k.fn.__name__,
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_raw_kernels_that_vote(capability, kernel, item_bytes, budget):
    c = _compiled(kernel, item_bytes, capability)
    assert c.barriers == 0
    assert per_element(c, PROGRAM, 1) <= budget
    # 32 programs of one warp fill an SM only if a lane needs no more than 64 registers
    assert c.registers <= 64


@pytest.mark.parametrize("item_bytes", (4, 2))
def test_rows_are_loaded_ahead_of_their_use(item_bytes):
    c = _compiled(zvc_encode_kernel, item_bytes)
    first_store = next(i for i, line in enumerate(c.sass_lines) if "STG" in line)
    assert sum("LDG" in line for line in c.sass_lines[:first_store]) >= AHEAD[item_bytes]


@pytest.mark.parametrize("item_bytes, budget", [(4, 20), (2, 20)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_csr_encode_stores_whole_words(capability, item_bytes, budget):
    c = _compiled(csr_encode_kernel, item_bytes, capability)
    assert per_element(c, PROGRAM, 1) <= budget
    row_words = item_bytes * 32 + 32
    assert c.stores == CSR_ROWS * row_words // 32 + 1, "8 bytes a lane, and the counts"
    assert c.loads == CSR_ROWS * item_bytes, "8 bytes a lane"
    first_store = next(i for i, line in enumerate(c.sass_lines) if "STG" in line)
    assert sum("LDG" in line for line in c.sass_lines[:first_store]) == c.loads


@pytest.mark.parametrize("item_bytes, budget", [(4, 18), (2, 18)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_raw_csr_decode_gathers_in_shared_memory(capability, item_bytes, budget):
    c = _compiled(csr_decode_kernel, item_bytes, capability)
    assert c.barriers == 0
    # for a density of up to a quarter the loop runs once; a part of the listing is the last program's
    assert per_element(c, PROGRAM, 1) <= budget
    assert c.registers <= 64
    assert per_element(loop_body(c), 32 * CSR_ROWS * CSR_PIECES, 1) <= 18


@pytest.mark.parametrize("item_bytes, budget", [(4, 36), (2, 21)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_raw_csr_backward_scatters_over_wide_zeros(capability, item_bytes, budget):
    c = _compiled(csr_backward_kernel, item_bytes, capability)
    assert c.barriers == 1
    assert c.stores_128 >= PROGRAM * item_bytes // 512
    # fill and, for a density of up to an eighth, one round of the loop; the rest of the listing is the last program's
    assert per_element(c, PROGRAM, 1) <= budget
    # each round moves up to 128 stored elements
    assert per_element(loop_body(c), 128, 1) <= 36


@pytest.mark.parametrize("fmt, scaling, encode, decode", [
    ("fp16", "none", 29, 26),
    ("fp10", "none", 31, 36),
    ("fp8", "none", 31, 24),
    ("fp8", "tensor", None, 27),
    ("fp8", "block", None, 35),
])  # fmt: skip
def test_lossy_formats_cost_what_they_cost(fmt, scaling, encode, decode):
    if encode is not None:
        assert per_element(_compiled(zvc_encode_kernel, 2, fmt=fmt), PROGRAM, 1) <= encode
    assert per_element(_compiled(zvc_decode_kernel, 2, fmt=fmt, scaling=scaling), PROGRAM, 1) <= decode


@pytest.mark.parametrize("item_bytes", (4, 2))
@pytest.mark.parametrize("kernel", VOTING.values(), ids=VOTING)
def test_reading_a_scratch_costs_no_more(kernel, item_bytes):
    assert per_element(_compiled(kernel, item_bytes, packed=False), PROGRAM, 1) <= 21


@pytest.mark.parametrize("kind", ("*i32", "*i16", "*u8"))
def test_compact(kind):
    slots, pieces = ZVC_SHAPE
    kinds = {"scratch_ptr": kind, "packed_ptr": kind, "counts_ptr": "*i16", "ends_ptr": "*i64"}
    constexprs = {"STRIDE": 1024, "SLOTS": slots, "PIECES": pieces}
    c = compile_kernel(compact_kernel, kinds | {"total": "i32", "slots": "i32"}, constexprs, 90, num_warps=1)
    assert (c.spills, c.barriers) == (0, 0)
    assert per_element(loop_body(c), 32 * slots * pieces, 1) <= 8


@pytest.mark.parametrize("kind", ("*i32", "*i16", "*u8"))
def test_csr_compact(kind):
    slots, pieces = CSR_SHAPE
    kinds = {"columns_ptr": "*u8", "values_ptr": kind, "counts_ptr": "*i16", "ends_ptr": "*i64", "total": "i32"}
    kinds |= {"packed_columns_ptr": "*u8", "packed_values_ptr": kind, "slots": "i32"}
    constexprs = {"STRIDE": 256, "SLOTS": slots, "PIECES": pieces}
    c = compile_kernel(compact_pair_kernel, kinds, constexprs, 90, num_warps=1)
    assert (c.spills, c.barriers) == (0, 0)
    assert per_element(loop_body(c), 32 * slots * pieces, 1) <= 15


@pytest.mark.parametrize("kernel", VOTING.values(), ids=VOTING)
def test_addresses_are_64_bit(kernel):
    """Slot 2**21 starts at element 2**31: the program id is widened before it is multiplied."""
    ptx = _compiled(kernel, 4).ptx
    program = re.search(r"mov\.u32\s+(%r\d+), %ctaid\.x", ptx)
    uses = [line for line in ptx.splitlines() if program and re.search(rf"{program[1]}\b", line)][1:]
    assert uses and all(re.search(r"\.wide\.|cvt\.\w64", use) for use in uses), uses
