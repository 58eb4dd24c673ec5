"""What one program of :mod:`gistkit.kernels.rebuild.rebuild` does: elements, rows, channels."""

from __future__ import annotations

from functools import lru_cache

import triton

from gistkit.formats import ceil_div

# elements a program, by bytes an element: 64 bytes of each tensor a lane
TILE = {2: 4096, 4: 2048}
# where rows have odd lengths, every element is an access of its own
SMALL_TILE = 1024
# rows of 8 elements a program where a plane is no whole number of 16-byte accesses; 512 take registers and gain nothing
ACROSS_ROWS = 256
# channels a program where they lie together: several pixels then share a lane's factors
CHANNELS = 256


@lru_cache(maxsize=256)
def shape_of(n: int, channels: int, plane: int, item_bytes: int) -> tuple[int, int, int, int, int]:
    """(outer, inner, STEP, OUTER, INNER) for n elements."""
    inner = channels if plane == 1 else plane
    step = next(s for s in (8, 4, 1) if inner % s == 0)
    tile = TILE[item_bytes] if step > 1 else SMALL_TILE
    block = min(tile if plane > 1 else CHANNELS, triton.next_power_of_2(inner))
    return n // inner, inner, step, tile // block, block


@lru_cache(maxsize=256)
def planes_across(channels: int, plane: int, item_bytes: int) -> int:
    """Planes a group of :func:`_across_kernel`, a multiple of 8; 0 where the other kernel is to run.

    As many as fill one program, or several, best: 40 planes of 49 elements are 245 rows of 256.
    """
    if plane < 8 or channels % 8 or plane % (16 // item_bytes) == 0:
        return 0
    filled = {
        k: k * plane / (ceil_div(k * plane, ACROSS_ROWS) * ACROSS_ROWS) for k in range(1, min(channels // 8, 32) + 1)
    }
    whole = min(ACROSS_ROWS // plane, channels // 8)
    return 8 * (whole if whole and filled.get(whole, 0.0) > 0.9 else max(filled, key=lambda k: filled[k]))
