"""What the 32 lanes of one warp tell each other, for kernels in which a lane holds exactly one element.

A vector of LANES elements in a program of one warp lies one element a lane, in order, so a scan needs no shared memory
and no barrier. A block-wide ``tl.cumsum`` costs 41.6 instructions a bf16 element, over the budget of 21.

The helpers are single PTX instructions and need ``num_warps=1``. The interpreter has no inline assembly: tests run the
compiled kernels in tests/support/warp.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from gistkit.kernels.launch.tiling import launch

LANES = tl.constexpr(32)
_SCAN = tl.constexpr(
    "{ .reg .pred p; .reg .b32 below; mov.b32 $0, $1; "
    + " ".join(
        f"shfl.sync.up.b32 below|p, $0, {step}, 0, 0xffffffff; @p add.u32 $0, $0, below;" for step in (1, 2, 4, 8, 16)
    )
    + " }"
)


@triton.jit
def popcount(words):
    """Bits set in each element of int32 words; one PTX instruction."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def sum_upto(x):
    """Sums of int32[LANES] up to each lane, its own included."""
    return tl.inline_asm_elementwise(_SCAN, "=&r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def last_lane(x):
    """The last lane's element of int32[LANES], in every lane."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def pick_lane(x, lane):
    """int32[LANES] x of the lanes that are asked for, 0 <= lane < LANES."""
    text: tl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return tl.inline_asm_elementwise(text, "=r,r,r", [x, lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def first_above(ends, place, SLOTS: tl.constexpr):
    """Which of the first SLOTS of ends, int32[LANES] in order, is the first above place; the last if none is."""
    found = place * 0
    for half in tl.static_range(1, 6):
        if SLOTS >> half > 0:
            above = pick_lane(ends, found + ((SLOTS >> half) - 1))
            found += tl.where(above <= place, SLOTS >> half, 0)
    return found


@lru_cache(maxsize=64)
def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def asm_level(x: torch.Tensor) -> int:
    """Kernels' ASM: the compute capability of x's device, 90 for 9.0; 0 on the CPU, in the interpreter."""
    return _capability(x.get_device()) if x.is_cuda else 0


def launch_warps(kernel: Any, programs: int, x: torch.Tensor, *args: Any, **constexprs: Any) -> None:
    """Run one-warp programs on x's device; none for 0 programs. Products are never fused into additions."""
    launch(kernel, programs, x, *args, num_warps=1, **constexprs)
