"""Shared memory of one warp: single items at any place become whole 8- or 16-byte accesses to global memory.

A row of 256 items is staged before it leaves the warp. In pieces that fill no 32-byte sector an H200 takes 30 to 40
thousand million stores a second, of any width: 29 % of a copy's speed for csr's bf16 encode at a density of 0.1.

PTX for ``num_warps=1``: the lanes of a warp run in step, so no barrier of the block is needed. Each ``open_stage`` in a
kernel's code is memory of its own; what it holds at first is undefined.
"""

import triton
import triton.language as tl

_OPEN = "{{ .shared .align 16 .b8 stage[{}]; mov.b32 $0, stage; }}"
# a byte, a 16-bit item or an fp32 item for each place of 1024, and for eight more
_OPEN_1, _OPEN_2, _OPEN_4 = (tl.constexpr(_OPEN.format(1032 * size)) for size in (1, 2, 4))
_SYNC = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")

_STAGE_16 = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)
_STAGE_8 = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }")
_UNSTAGE_16 = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_UNSTAGE_8 = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")


def pushes(words: int, item_bytes: int, columns: int = 0) -> str:
    """PTX: the items of the words that are not 0 to shared memory from address $1 on, close together. With columns, a
    distance in bytes, an item's column goes that far behind it; the first one's is the last operand."""
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


def _pulls(words: int, kind: str, item_bytes: int) -> str:
    """PTX: the words $0... of the items whose marks are set in the last operand, from the address before it on. Items
    are loaded as ``kind``: a byte as ``s8`` becomes both bytes of a half, or all four of a word."""
    address, marks = f"${words}", f"${words + 1}"
    text = f"{{ .reg .pred p; .reg .b32 at, bit, h<8>; mov.b32 at, {address}; "
    for item in range(8):
        text += f"and.b32 bit, {marks}, {1 << item}; setp.ne.b32 p, bit, 0; mov.b32 h{item}, 0; "
        text += f"@p ld.shared.{kind} h{item}, [at]; @p add.u32 at, at, {item_bytes}; "
    for word in range(words):
        low, high = f"h{2 * word}", f"h{2 * word + 1}"
        text += f"mov.b32 ${word}, h{word}; " if words == 8 else f"prmt.b32 ${word}, {low}, {high}, 0x5410; "
    return text + " }"


_PUSH_2, _PUSH_4 = tl.constexpr(pushes(4, 2)), tl.constexpr(pushes(8, 4))
_PULL_2, _PULL_4 = tl.constexpr(_pulls(4, "u16", 2)), tl.constexpr(_pulls(8, "b32", 4))
_PULL_FLAGS_2, _PULL_FLAGS_4 = tl.constexpr(_pulls(4, "s8", 1)), tl.constexpr(_pulls(8, "s8", 1))


@triton.jit
def open_stage(lane, ITEM_BYTES: tl.constexpr):
    """int32[LANES]: the address, in every lane, of 1032 items' shared memory."""
    text: tl.constexpr = _OPEN_1 if ITEM_BYTES == 1 else (_OPEN_2 if ITEM_BYTES == 2 else _OPEN_4)
    return tl.inline_asm_elementwise(text, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def clear_stage(stage, lane, BYTES: tl.constexpr):
    """Fill its first BYTES bytes, a multiple of 512, with zeros."""
    zero = lane * 0
    for first in tl.static_range(0, BYTES, 512):
        stage_words(stage + first + 16 * lane, (zero, zero, zero, zero), zero == 0)


@triton.jit
def warp_sync(stage):
    """The stage's address, once every lane has come here."""
    return tl.inline_asm_elementwise(_SYNC, "=r,r", [stage], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def run(TEXT: tl.constexpr, operands):
    """Run PTX on a tuple of 32-bit operands, from $1 on; $0 is of no use."""
    tl.inline_asm_elementwise(TEXT, "=r" + ",r" * len(operands), operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def stage_words(address, words, flag):
    """The 2, 4 or 8 words to the shared memory at address where the flag is set."""
    flag = flag.to(tl.int32)
    if len(words) == 2:
        run(_STAGE_8, (address,) + words + (flag,))
    else:
        for first in tl.static_range(0, len(words), 4):
            run(_STAGE_16, (address + 4 * first,) + words[first : first + 4] + (flag,))


@triton.jit
def unstage_words(address, WORDS: tl.constexpr):
    """2, 4 or 8 int32 words of shared memory."""
    words = ()
    if WORDS == 2:
        words += tl.inline_asm_elementwise(
            _UNSTAGE_8, "=r,=r,r", [address], dtype=(tl.int32,) * 2, is_pure=False, pack=1
        )
    else:
        for first in tl.static_range(0, WORDS, 4):
            words += tl.inline_asm_elementwise(
                _UNSTAGE_16, "=r,=r,=r,=r,r", [address + 4 * first], dtype=(tl.int32,) * 4, is_pure=False, pack=1
            )
    return words


@triton.jit
def push_octet(address, w, first: tl.constexpr, XB: tl.constexpr):
    """The octet's items that are not 0, close together from a shared address on."""
    text: tl.constexpr = _PUSH_2 if XB == 2 else _PUSH_4
    run(text, (address,) + w[first : first + 2 * XB] + (address,))


@triton.jit
def pull_octet(address, marks, XB: tl.constexpr, FLAGS: tl.constexpr = False):
    """The octet's words: marked items from a shared address on, 0 where there is no mark. FLAGS: the items are bytes of
    0xFF and 0, each of which fills one of XB bytes."""
    if FLAGS:
        text: tl.constexpr = _PULL_FLAGS_2 if XB == 2 else _PULL_FLAGS_4
    else:
        text: tl.constexpr = _PULL_2 if XB == 2 else _PULL_4
    results: tl.constexpr = "=&r," * (2 * XB)
    return tl.inline_asm_elementwise(
        text, results + "r,r", [address, marks], dtype=(tl.int32,) * (2 * XB), is_pure=False, pack=1
    )


# csr: items with their column bytes, eight neighbours a lane


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
    """PTX: eight items to their places of four rows of 256, from address $1 on. Bytes, four to a word, of the items in
    order: columns $2 and $3, rows $4 and $5, and $6 and $7, odd where an item is to be put. The items are those of the
    words after these; without words they are 0xFF."""
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
    run(text, (address,) + w[first : first + 2 * XB] + (column,))


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
