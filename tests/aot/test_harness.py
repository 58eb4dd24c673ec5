"""Spills, which all other tests of machine code deny, are seen where there are some."""

import triton
import triton.language as tl

from tests.aot.harness import compile_kernel


@triton.jit
def _sum_rows(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x_ptr + offs + start)
    tl.store(y_ptr + offs, total)


def test_spills_are_seen():
    # 64 KiB of values in 32 lanes cannot fit 24 registers.
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}
    c = compile_kernel(_sum_rows, signature, {"BLOCK": 4096}, 90, num_warps=1, maxnreg=24)
    assert c.spills > 0 and c.stack_bytes > 0
