"""One scale for a whole tensor: maxima of stretches in one launch; the encoder's programs make the exponent of them.

The tensor is read twice, so such an encoding takes at least (2 reads + 1 write) / (1 read + 1 write) of a copy's time
for its bytes: 9/5 from fp32 to fp8, 5/3 from bf16. The first pass goes from the end to the start: what is in the cache
then is what the encoder reads first. That every program of the encoder reduces the maxima anew costs less than the
launch of a program that does it for all.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div
from gistkit.kernels.launch.tiling import launch
from gistkit.kernels.narrow.rounding import encoding_factor, exponent_byte, finite_amax, finite_key

AMAX_PROGRAMS = 1024
AMAX_BLOCK = {2: 4096, 4: 2048}
"""Elements a program reads at a time, by bytes an element: 64 bytes a lane in flight."""
MAXIMA = tl.constexpr(AMAX_PROGRAMS)


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, n, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Largest finite magnitude pattern of every grid-stride stretch of x, from the end to the start.

    ALIGNED: n is a multiple of 16. Where it is not, whole blocks are loaded without a mask, so that loads stay wide.
    """
    best = tl.zeros((BLOCK,), tl.uint32)
    offs = tl.arange(0, BLOCK)
    first = (tl.cdiv(n, BLOCK) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK
    # while, not range: the interpreter of Triton 3.6 cannot take a loop's bounds from tensors
    while first >= 0:
        if ALIGNED or n - first < BLOCK:
            mask = offs < tl.minimum(n - first, BLOCK).to(tl.int32)
            best = tl.maximum(best, finite_key(tl.load(x_ptr + first + offs, mask, other=0)))
        else:
            best = tl.maximum(best, finite_key(tl.load(x_ptr + first + offs)))
        first -= tl.num_programs(0).to(tl.int64) * BLOCK
    tl.store(amax_ptr + tl.program_id(0), finite_amax(tl.max(best, axis=0)))


@triton.jit
def tensor_byte(amax_ptr, stretches, exponent_ptr, FMT: tl.constexpr):
    """int32 exponent byte from the maxima of all stretches; program 0 writes it."""
    offs = tl.arange(0, MAXIMA)
    b = exponent_byte(tl.max(tl.load(amax_ptr + offs, offs < stretches, other=0), axis=0), FMT)
    tl.store(exponent_ptr, b.to(tl.uint8), tl.program_id(0) == 0)
    return b


@triton.jit
def tensor_factor(amax_ptr, stretches, exponent_ptr, FMT: tl.constexpr):
    """fp32 factor that an encoder multiplies by, as :func:`tensor_byte`."""
    return encoding_factor(tensor_byte(amax_ptr, stretches, exponent_ptr, FMT), FMT)


def stretch_maxima(x: torch.Tensor) -> torch.Tensor:
    """int32[at most AMAX_PROGRAMS] fp32 patterns whose largest is that of x's largest finite magnitude.

    A multiple of 16, which Triton knows then and loads wide; programs too many write 0.
    """
    block = AMAX_BLOCK[x.element_size()]
    programs = min(AMAX_PROGRAMS, 16 * ceil_div(x.numel(), 16 * block))
    amax = torch.empty((programs,), dtype=torch.int32, device=x.device)
    launch(_amax_kernel, programs, x, x, amax, x.numel(), BLOCK=block, ALIGNED=x.numel() % 16 == 0)
    return amax
