"""The harness itself, on kernels whose machine code is known."""

import triton
import triton.language as tl

from tests.aot.harness import Compiled, compile_kernel, opcode_of, per_element


@triton.jit
def _copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask), mask)


@triton.jit
def _sum_rows(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x_ptr + offs + start)
    tl.store(y_ptr + offs, total)


def _compiled_copy(capability: int, **options) -> Compiled:
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i64"}
    return compile_kernel(_copy, signature, {"BLOCK": 1024}, capability, **options)


def test_copy_kernel():
    # 1024 fp32 over 128 lanes: 8 values a lane, two 16-byte accesses where n's divisibility lets the masks be uniform.
    c = _compiled_copy(90, divisible=("x_ptr", "y_ptr", "n"))
    assert (c.loads_128, c.stores_128, c.loads, c.stores) == (2, 2, 2, 2)
    assert (c.spills, c.barriers, c.shared_bytes, c.stack_bytes) == (0, 0, 0, 0)
    assert ".target sm_90" in c.ptx
    assert 8 <= c.registers <= 64
    assert opcode_of(c.sass_lines[-1]) == "EXIT", "padding after the last EXIT is not counted"
    assert per_element(c, 1024, 4) == c.instructions / 8
    assert per_element(c, 1024, 4) < 6


def test_spills_are_seen():
    # 64 KiB of values in 32 lanes cannot fit 24 registers.
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    c = compile_kernel(_sum_rows, signature, {"BLOCK": 4096}, 90, num_warps=1, maxnreg=24)
    assert c.spills > 0 and c.stack_bytes > 0
