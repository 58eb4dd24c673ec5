"""Shared memory of one warp: scattered single items become whole 8-byte accesses to global memory.

A row of 256 items is staged before it leaves the warp. Stored one vote's worth at a time instead, a compacted row goes
out in pieces that fill no 32-byte sector: an H200 takes 30 to 40 thousand million of such stores a second, whatever
their width, which kept csr's bf16 encode at 29 % of a copy where a tenth of the elements is stored.

PTX only (kernels take another way in the interpreter) and for ``num_warps=1``: the lanes of a warp run in step, so that
no barrier of the block is needed. Each ``open_stage`` in a kernel's code is memory of its own; what it holds at first
is undefined.
"""

from __future__ import annotations

import triton
import triton.language as tl

_OPEN = "{{ .shared .align 16 .b8 stage[{}]; mov.b32 $0, stage; }}"
_OPEN_256, _OPEN_512, _OPEN_1024 = (tl.constexpr(_OPEN.format(size)) for size in (256, 512, 1024))
_PUT = "{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b{} [$1], $2; mov.b32 $0, 0; }}"
_PUT_8, _PUT_16, _PUT_32 = (tl.constexpr(_PUT.format(bits)) for bits in (8, 16, 32))
_GET = "{{ bar.warp.sync 0xffffffff; ld.shared.{} $0, [$1]; }}"
_GET_8, _GET_16, _GET_32, _GET_64 = (tl.constexpr(_GET.format(kind)) for kind in ("u8", "u16", "b32", "b64"))
_ZERO = tl.constexpr("{ .reg .b64 z; mov.b64 z, 0; st.shared.b64 [$1], z; mov.b32 $0, 0; }")


@triton.jit
def open_stage(lane, BYTES: tl.constexpr):
    """int32[LANES]: the address, in every lane, of 256, 512 or 1024 bytes of shared memory."""
    text: tl.constexpr = _OPEN_256 if BYTES == 256 else (_OPEN_512 if BYTES == 512 else _OPEN_1024)
    return tl.inline_asm_elementwise(text, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def clear_stage(stage, lane, BYTES: tl.constexpr):
    """Fill it with zeros."""
    for first in tl.static_range(0, BYTES, 256):
        tl.inline_asm_elementwise(_ZERO, "=r,r", [stage + first + 8 * lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put(stage, place, item, flag, ITEM_BYTES: tl.constexpr):
    """item (int32, its low ITEM_BYTES bytes) to a place of the stage in the lanes whose flag (int32) is not 0."""
    text: tl.constexpr = _PUT_8 if ITEM_BYTES == 1 else (_PUT_16 if ITEM_BYTES == 2 else _PUT_32)
    tl.inline_asm_elementwise(
        text, "=r,r,r,r", [stage + place * ITEM_BYTES, item, flag], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def get_words(stage, word):
    """int64: the 8-byte words, as every lane has put them."""
    return tl.inline_asm_elementwise(_GET_64, "=l,r", [stage + word * 8], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def get_items(stage, place, ITEM_BYTES: tl.constexpr):
    """int32: single items, zero-extended."""
    text: tl.constexpr = _GET_8 if ITEM_BYTES == 1 else (_GET_16 if ITEM_BYTES == 2 else _GET_32)
    return tl.inline_asm_elementwise(text, "=r,r", [stage + place * ITEM_BYTES], dtype=tl.int32, is_pure=False, pack=1)
