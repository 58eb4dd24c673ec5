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
# two or four rows with their columns, and a slot of zvc with eight places more
_OPEN_4096, _OPEN_2064, _OPEN_4128 = (tl.constexpr(_OPEN.format(size)) for size in (4096, 2064, 4128))
_PUT = "{{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b{} [$1], $2; mov.b32 $0, 0; }}"
_PUT_8, _PUT_16, _PUT_32 = (tl.constexpr(_PUT.format(bits)) for bits in (8, 16, 32))
_GET = "{{ bar.warp.sync 0xffffffff; ld.shared.{} $0, [$1]; }}"
_GET_8, _GET_16, _GET_32, _GET_64 = (tl.constexpr(_GET.format(kind)) for kind in ("u8", "u16", "b32", "b64"))
_ZERO = tl.constexpr("{ .reg .b64 z; mov.b64 z, 0; st.shared.b64 [$1], z; mov.b32 $0, 0; }")

_STAGE_16 = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)
_UNSTAGE_16 = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_SYNC = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")

_EVEN_BYTES, _FIRST_BYTES, _LOW_HALVES = (
    tl.constexpr(f"prmt.b32 $0, $1, $2, {picked};") for picked in ("0x6420", "0x0040", "0x5410")
)


def _pushes(words: int, item_bytes: int, columns: int = 0) -> str:
    """PTX: the items of the words that are not 0 to shared memory from address $1 on, close together.

    With columns, a distance in bytes, an item's column goes that far behind it; the first one's is the last operand.
    """
    text = "{ .reg .pred p, q; .reg .b32 at, low, high, column; mov.b32 at, $1; "
    column = f"${2 + words}"

    def put(flag: str, item: str, index: int) -> str:
        stores = f"@{flag} st.shared.b{8 * item_bytes} [at], {item}; "
        if columns:
            stores += f"add.u32 column, {column}, {index}; @{flag} st.shared.b8 [at + {columns}], column; "
        return stores + f"@{flag} add.u32 at, at, {item_bytes}; "

    for word in range(words):
        source = f"${2 + word}"
        if item_bytes == 4:
            text += f"setp.ne.b32 p, {source}, 0; " + put("p", source, word)
        else:
            text += f"and.b32 low, {source}, 0xFFFF; setp.ne.b32 p, low, 0; "
            text += f"shr.u32 high, {source}, 16; setp.ge.u32 q, {source}, 0x10000; "
            text += put("p", source, 2 * word) + put("q", "high", 2 * word + 1)
    return text + "mov.b32 $0, at; }"


def _pulls(words: int, item_bytes: int) -> str:
    """PTX: the words $0... of the items whose marks are set in the last operand, from the address before it on."""
    address, marks = f"${words}", f"${words + 1}"
    load = "ld.shared.b32" if item_bytes == 4 else "ld.shared.u16"
    text = f"{{ .reg .pred p; .reg .b32 at, bit, h<8>; mov.b32 at, {address}; "
    for item in range(8):
        text += f"and.b32 bit, {marks}, {1 << item}; setp.ne.b32 p, bit, 0; mov.b32 h{item}, 0; "
        text += f"@p {load} h{item}, [at]; @p add.u32 at, at, {item_bytes}; "
    for word in range(words):
        low, high = f"h{2 * word}", f"h{2 * word + 1}"
        text += f"mov.b32 ${word}, h{word}; " if item_bytes == 4 else f"prmt.b32 ${word}, {low}, {high}, 0x5410; "
    return text + " }"


_PUSH_2, _PUSH_4 = tl.constexpr(_pushes(4, 2)), tl.constexpr(_pushes(8, 4))
# rows of 256 items, and as many columns behind them, an item's width apart
_PUSH_ROW_2, _PUSH_ROW_4 = tl.constexpr(_pushes(4, 2, 512)), tl.constexpr(_pushes(8, 4, 1024))
_PULL_2, _PULL_4 = tl.constexpr(_pulls(4, 2)), tl.constexpr(_pulls(8, 4))


@triton.jit
def open_stage(lane, BYTES: tl.constexpr):
    """int32[LANES]: the address, in every lane, of 256, 512, 1024, 2064, 4096 or 4128 bytes of shared memory."""
    small: tl.constexpr = _OPEN_256 if BYTES == 256 else (_OPEN_512 if BYTES == 512 else _OPEN_1024)
    large: tl.constexpr = _OPEN_2064 if BYTES == 2064 else (_OPEN_4096 if BYTES == 4096 else _OPEN_4128)
    text: tl.constexpr = small if BYTES <= 1024 else large
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


@triton.jit
def warp_sync(stage):
    """The stage's address, once every lane has come here."""
    return tl.inline_asm_elementwise(_SYNC, "=r,r", [stage], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stage_words(address, words, flag):
    """The 4 or 8 words to the shared memory at address where the flag is set."""
    for first in tl.static_range(0, len(words), 4):
        tl.inline_asm_elementwise(
            _STAGE_16,
            "=r,r,r,r,r,r,r",
            [
                address + 4 * first,
                words[first],
                words[first + 1],
                words[first + 2],
                words[first + 3],
                flag.to(tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def unstage_words(address, WORDS: tl.constexpr):
    """4 or 8 int32 words of shared memory."""
    words = ()
    for first in tl.static_range(0, WORDS, 4):
        words += tl.inline_asm_elementwise(
            _UNSTAGE_16, "=r,=r,=r,=r,r", [address + 4 * first], dtype=(tl.int32,) * 4, is_pure=False, pack=1
        )
    return words


@triton.jit
def push_octet(address, w, first: tl.constexpr, XB: tl.constexpr):
    """The octet's items that are not 0, close together from a shared address on."""
    if XB == 2:
        tl.inline_asm_elementwise(
            _PUSH_2,
            "=r,r,r,r,r,r",
            [address, w[first], w[first + 1], w[first + 2], w[first + 3]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            _PUSH_4,
            "=r,r,r,r,r,r,r,r,r,r",
            [
                address,
                w[first],
                w[first + 1],
                w[first + 2],
                w[first + 3],
                w[first + 4],
                w[first + 5],
                w[first + 6],
                w[first + 7],
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def pull_octet(address, marks, XB: tl.constexpr):
    """The octet's words: marked items from a shared address on, 0 where there is no mark."""
    if XB == 2:
        return tl.inline_asm_elementwise(
            _PULL_2, "=&r,=&r,=&r,=&r,r,r", [address, marks], dtype=(tl.int32,) * 4, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _PULL_4,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [address, marks],
            dtype=(tl.int32,) * 8,
            is_pure=False,
            pack=1,
        )


@triton.jit
def push_row(address, column, w, first: tl.constexpr, XB: tl.constexpr):
    """As push_octet, with the items' columns, counted from column on, 256 items' bytes behind."""
    if XB == 2:
        tl.inline_asm_elementwise(
            _PUSH_ROW_2,
            "=r,r,r,r,r,r,r",
            [address, w[first], w[first + 1], w[first + 2], w[first + 3], column],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            _PUSH_ROW_4,
            "=r,r,r,r,r,r,r,r,r,r,r",
            [
                address,
                w[first],
                w[first + 1],
                w[first + 2],
                w[first + 3],
                w[first + 4],
                w[first + 5],
                w[first + 6],
                w[first + 7],
                column,
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _bytes_of(a, b, TEXT: tl.constexpr):
    """A word of bytes picked from two."""
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unstage_columns(address, XB: tl.constexpr):
    """Two words of eight column bytes that lie XB bytes apart in shared memory, whatever lies between them."""
    words = unstage_words(address, 2 * XB)
    columns = ()
    for w in tl.static_range(0, 2 * XB, XB):
        if XB == 2:
            columns += (_bytes_of(words[w], words[w + 1], _EVEN_BYTES),)
        else:
            low = _bytes_of(words[w], words[w + 1], _FIRST_BYTES)
            high = _bytes_of(words[w + 2], words[w + 3], _FIRST_BYTES)
            columns += (_bytes_of(low, high, _LOW_HALVES),)
    return columns
