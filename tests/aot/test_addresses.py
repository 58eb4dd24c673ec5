"""Kernels that walk a tensor by their program's number have addresses of 64 bits from that number on."""

import re

import pytest
import triton
import triton.language as tl

from gistkit.kernels.launch.tiling import NUM_WARPS, ROWS
from gistkit.kernels.narrow import narrow
from gistkit.kernels.sparse.csr_kernels import csr_backward_kernel, csr_encode_kernel
from gistkit.kernels.sparse.zvc_kernels import zvc_backward_kernel, zvc_decode_kernel, zvc_encode_kernel
from tests.aot import test_mask, test_narrow, test_sparse
from tests.aot.harness import compile_kernel

TILES = {"FMT": "fp8", "SCALED": False, "ROWS": ROWS[4], "COLUMNS": 8}
BLOCKS = {"FMT": "fp8", "SCALED": True, "ROWS": narrow.BLOCK_ROWS, "COLUMNS": 128}


def masks(name, **constexprs):
    return lambda: test_mask.build(getattr(test_mask.kernels, name), "fp32", 90, **constexprs)[0]


def narrows(kernel, **constexprs):
    return lambda: test_narrow.build(kernel, "fp32", constexprs.get("FMT", "fp10"), 90, **constexprs)


FLAGS = {"words_ptr": "*i32", "mask_ptr": "*i16", "n": "i32"}
KERNELS = {
    "mask encode": masks("_pack_kernel", RELU=False, KEEP_ZERO=False),
    "mask backward": masks("_select_kernel"),
    "flags pack": lambda: compile_kernel(test_mask.kernels._pack_flags_kernel, FLAGS, {"ROWS": 512}, 90, NUM_WARPS),
    "narrow encode": narrows(narrow._encode_kernel, **TILES, ASM=90, ALIGNED=True),
    "narrow decode": narrows(narrow._decode_kernel, **TILES),
    "narrow encode per block": narrows(narrow._encode_kernel, **BLOCKS, ASM=90, ALIGNED=True),
    "narrow decode per block": narrows(narrow._decode_kernel, **BLOCKS),
    "fp10 encode": narrows(narrow._pack10_kernel, SCALING="none", ROWS=narrow.ENCODE_ROWS),
    "fp10 decode": narrows(narrow._unpack10_kernel, SCALING="none", ROWS=narrow.DECODE_ROWS),
    "zvc encode": lambda: test_sparse.compiled(zvc_encode_kernel, "fp32"),
    "zvc decode": lambda: test_sparse.compiled(zvc_decode_kernel, "fp32"),
    "csr encode": lambda: test_sparse.compiled(csr_encode_kernel, "fp32"),
    "zvc backward": lambda: test_sparse.compiled(zvc_backward_kernel, "fp32"),
    "csr backward": lambda: test_sparse.compiled(csr_backward_kernel, "fp32"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_programs_number_is_widened_before_it_is_multiplied(name):
    ptx = KERNELS[name]().ptx
    program = re.search(r"mov\.u32\s+(%r\d+), %ctaid\.x", ptx)
    assert program
    uses = [line for line in ptx.splitlines() if re.search(rf"{program[1]}\b", line) and "%ctaid" not in line]
    assert uses and all(re.search(r"\.wide\.|cvt\.\w64", use) for use in uses), uses


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
