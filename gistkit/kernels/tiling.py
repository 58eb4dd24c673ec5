"""Tiles of [ROWS, 8] elements over a flat tensor, and the launch that covers it with them.

A lane then holds 8 neighbours in registers: one 16-byte access of a 16-bit type, two of fp32, one byte of a 1-bit mask.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div

# rows a program, by bytes an element of the widest tensor: 64 bytes of values a lane, so several accesses are in flight
ROWS = {1: 512, 2: 512, 4: 256}
NUM_WARPS = 4


@triton.jit
def span(n, SIZE: tl.constexpr):
    """(first element of this program's SIZE, how many of them are in bounds): int64 and int32.

    Offsets within a program stay int32, so that only its base address is 64-bit arithmetic.
    """
    first = tl.program_id(0).to(tl.int64) * SIZE
    return first, tl.minimum(n - first, SIZE).to(tl.int32)


@triton.jit
def tile(n, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """(first element, rows, rows in bounds, elements, elements in bounds); rows and elements count from the first.

    ALIGNED says that n is a multiple of 8: the bounds check is then per row and leaves wide accesses possible.
    """
    first, count = span(n, ROWS * 8)
    rows = tl.arange(0, ROWS)
    offs = rows[:, None] * 8 + tl.arange(0, 8)[None, :]
    row_mask = rows * 8 < count
    if ALIGNED:
        mask = tl.broadcast_to(row_mask[:, None], (ROWS, 8))
    else:
        mask = offs < count
    return first, rows, row_mask, offs, mask


def launch(kernel: Any, programs: int, x: torch.Tensor, *args: Any, **constexprs: Any) -> None:
    """Run kernel on x's device; not at all for 0 programs.

    Products are never contracted into fused multiply-adds, so that they round as written.
    """
    if programs:
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            kernel[(programs,)](*args, num_warps=NUM_WARPS, enable_fp_fusion=False, **constexprs)


def launch_tiles(kernel: Any, x: torch.Tensor, *args: Any, **constexprs: Any) -> None:
    """Run kernel(*args, n, ROWS, ALIGNED, ...) over the tiles of x, whose length and item size fix the grid."""
    n, rows = x.numel(), ROWS[x.element_size()]
    launch(kernel, ceil_div(n, rows * 8), x, *args, n, ROWS=rows, ALIGNED=n % 8 == 0, **constexprs)
