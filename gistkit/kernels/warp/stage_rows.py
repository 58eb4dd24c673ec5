"""Rows of csr in a warp's shared memory (see stage.py): items with their column bytes, eight neighbours a lane."""

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.kernels.warp.stage import pushes, run, unstage_words, with_words


def _pick(bytes_of_two: str) -> str:
    """PTX: the word $0 of bytes of the words $1 (0 to 3) and $2 (4 to 7), the highest first."""
    return f"prmt.b32 $0, $1, $2, 0x{bytes_of_two};"


EVEN_BYTES, UPPER_HALVES = (tl.constexpr(_pick(p)) for p in ("6420", "7632"))
_FIRST_BYTES, _LOW_HALVES = (tl.constexpr(_pick(p)) for p in ("0040", "5410"))
_SPREAD_1100, _SPREAD_3322 = (tl.constexpr(_pick(p)) for p in ("1100", "3322"))
_SPREAD_0, _SPREAD_1, _SPREAD_2, _SPREAD_3 = (tl.constexpr(_pick(p)) for p in ("0000", "1111", "2222", "3333"))
# two words of the bytes 1 from byte $2 on, of none where $2 is 8 or more, of all where it is 0 or less; a shift by more
# than 31 leaves nothing
_BYTES_FROM = tl.constexpr(
    "{ .reg .b32 s, ones; mov.b32 ones, 0x01010101; shl.b32 s, $2, 3; max.s32 s, s, 0; shl.b32 $0, ones, s; "
    "sub.s32 s, s, 32; max.s32 s, s, 0; shl.b32 $1, ones, s; }"
)


def _puts(words: int, item_bytes: int) -> str:
    """PTX: eight items to their places of four rows of 256, from address $1 on.

    Bytes, four to a word, of the items in order: columns $2 and $3, rows $4 and $5, and $6 and $7, odd where an item is
    to be put. The items are those of the words after these; without words they are 0xFF.
    """
    text = "{ .reg .pred p; .reg .b32 at, bit, item; mov.b32 item, 0xFF; "
    for i in range(8):
        half, byte = divmod(i, 4)
        # column + 256 * row; a row is below 128, so its sign makes the upper half 0
        picked = byte | (4 + byte) << 4 | (12 + byte) << 8 | (12 + byte) << 12
        text += f"prmt.b32 at, ${2 + half}, ${4 + half}, {picked:#x}; mad.lo.u32 at, at, {item_bytes}, $1; "
        text += f"and.b32 bit, ${6 + half}, {1 << (8 * byte)}; setp.ne.b32 p, bit, 0; "
        source = "item"
        if words == 8:
            source = f"${8 + i}"
        elif words and i % 2 == 0:
            source = f"${8 + i // 2}"
        elif words:
            text += f"shr.u32 item, ${8 + i // 2}, 16; "
        text += f"@p st.shared.b{8 * item_bytes} [at], {source}; "
    return text + "mov.b32 $0, 0; }"


# rows of 256 items, and as many columns behind them, an item's width apart
_PUSH_ROW_2, _PUSH_ROW_4 = tl.constexpr(pushes(4, 2, 512)), tl.constexpr(pushes(8, 4, 1024))
_PUT_FLAGS, _PUT_2, _PUT_4 = (tl.constexpr(_puts(*shape)) for shape in ((0, 1), (4, 2), (8, 4)))


@triton.jit
def push_row(address, column, w, first: tl.constexpr, XB: tl.constexpr):
    """As push_octet, with the items' columns, counted from column on, 256 items' bytes behind."""
    text: tl.constexpr = _PUSH_ROW_2 if XB == 2 else _PUSH_ROW_4
    with_words(text, address, w, first, 2 * XB, column)


@triton.jit
def bytes_of(a, b, TEXT: tl.constexpr):
    """A word of bytes picked from two."""
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unstage_columns(address, XB: tl.constexpr):
    """Two words of eight column bytes that lie XB bytes apart in shared memory, whatever lies between them."""
    words = unstage_words(address, 2 * XB)
    columns = ()
    for w in tl.static_range(0, 2 * XB, XB):
        if XB == 2:
            columns += (bytes_of(words[w], words[w + 1], EVEN_BYTES),)
        else:
            low = bytes_of(words[w], words[w + 1], _FIRST_BYTES)
            high = bytes_of(words[w + 2], words[w + 3], _FIRST_BYTES)
            columns += (bytes_of(low, high, _LOW_HALVES),)
    return columns


@triton.jit
def spread_flags(flags, XB: tl.constexpr):
    """An octet's words of XB bytes an item, each of which the item's byte of two words fills."""
    words = ()
    for f in tl.static_range(2):
        if XB == 2:
            words += (bytes_of(flags[f], flags[f], _SPREAD_1100), bytes_of(flags[f], flags[f], _SPREAD_3322))
        else:
            words += (bytes_of(flags[f], flags[f], _SPREAD_0), bytes_of(flags[f], flags[f], _SPREAD_1))
            words += (bytes_of(flags[f], flags[f], _SPREAD_2), bytes_of(flags[f], flags[f], _SPREAD_3))
    return words


@triton.jit
def bytes_from(place):
    """Two words of an octet's bytes: 1 from byte ``place`` on, any number, 0 before it."""
    return tl.inline_asm_elementwise(_BYTES_FROM, "=&r,=&r,r", [place], dtype=(tl.int32,) * 2, is_pure=True, pack=1)


@triton.jit
def put_flags(stage, columns, rows, flags):
    """The byte 0xFF to the places of an octet's flagged items in four rows of 256; two words of bytes each."""
    run(_PUT_FLAGS, (stage,) + columns + rows + flags)


@triton.jit
def put_octet(stage, columns, rows, flags, w, XB: tl.constexpr):
    """An octet's flagged items to their places in four rows of 256; columns, rows, flags: two words of bytes."""
    run(_PUT_2 if XB == 2 else _PUT_4, (stage,) + columns + rows + flags + w)
