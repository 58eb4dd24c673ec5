"""Eight neighbouring elements a lane: 16-byte accesses, a byte of marks, and a warp's shared memory in between.

The places follow from a scan over the lanes' counts, and values that are close together in the warp's shared memory
(see stage.py) reach global memory, and come from it, eight at a time: a narrow format converts only what is stored, in
whole words. A vote of one element a lane instead takes six instructions an element, and 2-byte accesses.

A 16-byte store of a lane that holds eight fp32 elements fills half of a 32-byte sector. Beside as many reads that costs
nothing; a csr decode of fp32 at a density of 0.1 took 231 us on an H200 that way, and 158 with stores of whole sectors.

CHUNKS of 256 elements are a slot of zvc. Items are seen as 32-bit words: two elements of 16 bits or one of fp32. ASM is
the device's compute capability, 90 for sm_90.
"""

import triton
import triton.language as tl

from gistkit.kernels.warp.lanes import LANES, last_lane, popcount, sum_upto
from gistkit.kernels.warp.stage import EVEN_BYTES, UPPER_HALVES, bytes_of

OCTET = tl.constexpr(8)
CHUNK = tl.constexpr(256)
CHUNKS = tl.constexpr(4)

_LOAD_16_IF = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }")
_LOAD_16 = tl.constexpr(
    _LOAD_16_IF.value.replace("@p", "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; @p")
)
_LOAD_8_IF = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }")
_STORE_16 = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $6, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }"
)
_STORE_8 = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0; }")
_NEIGHBOUR = tl.constexpr("shfl.sync.bfly.b32 $0, $1, 1, 31, 0xffffffff;")
_FP10_WORDS = tl.constexpr(
    "{ .reg .pred p; .reg .b32 which; setp.ge.s32 p, $2, $3; selp.b32 which, 1, 0, p; setp.ge.s32 p, $2, $4; "
    "@p mov.b32 which, 2; mad.wide.s32 $0, which, $5, $6; mad.lo.s32 $1, which, -10, 22; }"
)


@triton.jit
def load_16(ptr, flag, ZERO: tl.constexpr):
    """Four int32 words of 16 bytes at ptr; where the flag is not set 0 with ZERO, else undefined."""
    text: tl.constexpr = _LOAD_16 if ZERO else _LOAD_16_IF
    return tl.inline_asm_elementwise(
        text, "=&r,=&r,=&r,=&r,l,r", [ptr.to(tl.int64), flag.to(tl.int32)], dtype=(tl.int32,) * 4, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def load_8(ptr, flag):
    """Two int32 words of 8 bytes at ptr, undefined where the flag is not set."""
    return tl.inline_asm_elementwise(
        _LOAD_8_IF, "=&r,=&r,l,r", [ptr.to(tl.int64), flag.to(tl.int32)], dtype=(tl.int32,) * 2, is_pure=False, pack=1
    )


@triton.jit
def store_words(ptr, words, flag):
    """The 2, 4 or 8 words to ptr where the flag is set, 8 or 16 bytes at a time."""
    EACH: tl.constexpr = 2 if len(words) == 2 else 4
    text: tl.constexpr = _STORE_8 if EACH == 2 else _STORE_16
    address, flag = ptr.to(tl.int64), flag.to(tl.int32)
    for first in tl.static_range(0, len(words), EACH):
        operands = (address + 4 * first,) + words[first : first + EACH] + (flag,)
        tl.inline_asm_elementwise(text, "=r,l" + ",r" * (EACH + 1), operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fp10_words(ptr, start, place, planes, plane):
    """(pointer, shift) of the packed fp10 codes from start (int64) + place on: their words, and how far to the left a
    code of these goes to end up as the word's first bits. ptr: of the words; planes: where, counted as place is, the
    second and the third plane of ``plane`` words start."""
    if plane.dtype == tl.int64:
        which = (place >= planes[0]).to(tl.int32) + (place >= planes[1]).to(tl.int32)
        return ptr + (start + place - which * plane), 22 - which * 10
    else:
        first, shift = tl.inline_asm_elementwise(
            _FP10_WORDS, "=l,=r,r,r,r,r,l", [place, planes[0], planes[1], -plane, start + place],
            dtype=(tl.int64, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        return ptr + first, shift


@triton.jit
def fp10_pair(low, high, shift):
    """A word of the codes of two words, each the first bits of a half."""
    return bytes_of(low << shift, high << shift, UPPER_HALVES)


@triton.jit
def spread_program(PLANES: tl.constexpr):
    """int64: which slots the program takes. PLANES: three programs in a row read the same words of fp10's three planes:
    slots a third of all apart, which start about a plane apart where the density is the same everywhere, so that the
    cache has what the others read. In order, each would come from memory three times."""
    program = tl.program_id(0)
    if PLANES:
        third = tl.num_programs(0) // 3
        program = tl.where(program < 3 * third, program % 3 * third + program // 3, program)
    return program.to(tl.int64)


@triton.jit
def load_octets(x_ptr, left, XB: tl.constexpr, WIDE: tl.constexpr):
    """A slot's words, 2 * XB a chunk, 0 from element left on: all loads before any use. WIDE: x_ptr is 16-byte aligned
    and left a multiple of 8."""
    words = ()
    for c in tl.static_range(CHUNKS):
        offs = tl.arange(0, LANES) * OCTET + c * CHUNK
        if WIDE:
            for first in tl.static_range(0, OCTET, 16 // XB):
                words += load_16(x_ptr + offs + first, offs < left, True)
        else:
            for i in tl.static_range(0, OCTET, 4 // XB):
                word = tl.load(x_ptr + offs + i, offs + i < left, other=0).to(tl.int32)
                if XB == 2:
                    high = tl.load(x_ptr + offs + i + 1, offs + i + 1 < left, other=0).to(tl.int32)
                    word = (word & 0xFFFF) | (high << 16)
                words += (word,)
    return words


@triton.jit
def item_of(words, first: tl.constexpr, i: tl.constexpr, XB: tl.constexpr):
    """Item i of the octet whose words start at words[first]: int32 or int16 patterns."""
    if XB == 4:
        return words[first + i]
    else:
        return (words[first + i // 2] >> (16 * (i % 2))).to(tl.int16)


@triton.jit
def _halves_set(word, ASM: tl.constexpr):
    """Bits 0 and 16: whether the lower and the upper half of a word are not 0."""
    if ASM >= 90:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 one; mov.b32 one, 0x00010001; min.u16x2 $0, $1, one; }", "=r,r", [word], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return ((((word & 0x7FFF7FFF) + 0x7FFF7FFF) | word) >> 15) & 0x00010001


@triton.jit
def passing_flags(words, first: tl.constexpr, WORDS: tl.constexpr, FMT: tl.constexpr, ASM: tl.constexpr):
    """Two words of a byte an item: 0 for -0.0 and its codes, 1 for all else, of the WORDS words from words[first] on.
    fp10's codes lie 6 bits higher, over bits that are not defined."""
    flags = ()
    if WORDS == 2:
        for w in tl.static_range(first, first + 2):
            other = words[w] ^ -0x7F7F7F80
            flags += (((((other & 0x7F7F7F7F) + 0x7F7F7F7F) | other) >> 7) & 0x01010101,)
    elif WORDS == 4:
        for w in tl.static_range(first, first + 4, 2):
            low, high = words[w] ^ -0x7FFF8000, words[w + 1] ^ -0x7FFF8000
            if FMT == "fp10":
                low, high = low & -0x003F0040, high & -0x003F0040
            flags += (bytes_of(_halves_set(low, ASM), _halves_set(high, ASM), EVEN_BYTES),)
    else:
        for w in tl.static_range(first, first + 8, 4):
            word = (words[w] != -0x80000000).to(tl.int32)
            for i in tl.static_range(1, 4):
                word |= (words[w + i] != -0x80000000).to(tl.int32) << (8 * i)
            flags += (word,)
    return flags


@triton.jit
def passed(grads, first: tl.constexpr, flags):
    """The words of gradients from grads[first] on, 0 where flags, as many words, are."""
    words = ()
    for w in tl.static_range(len(flags)):
        words += (grads[first + w] & flags[w],)
    return words


@triton.jit
def octet_marks(words, first: tl.constexpr, XB: tl.constexpr, ASM: tl.constexpr):
    """int32 0..255: bit i is "item i is not 0"."""
    marks = tl.zeros((LANES,), tl.int32)
    if XB == 2:
        for w in tl.static_range(4):
            marks += _halves_set(words[first + w], ASM) << (2 * w)
        return (marks | (marks >> 15)) & 0xFF
    else:
        for w in tl.static_range(8):
            marks += (words[first + w] != 0).to(tl.int32) << w
        return marks


@triton.jit
def _counted(marks):
    """Marked items of each of the CHUNKS, two to a word: (those of the lanes below, a word a pair; of all lanes)."""
    low = popcount(marks[0]) | (popcount(marks[1]) << 16)
    high = popcount(marks[2]) | (popcount(marks[3]) << 16)
    upto_low, upto_high = sum_upto(low), sum_upto(high)
    return (upto_low - low, upto_high - high), (last_lane(upto_low), last_lane(upto_high))


@triton.jit
def octet_places(marks):
    """(places, count): where the lane's marked items of each of the CHUNKS start in the slot, and the slot's number."""
    below, total = _counted(marks)
    half = (total[0] & 0xFFFF) + (total[0] >> 16)
    low = below[0] + (total[0] << 16)
    high = below[1] + (total[1] << 16) + half * 0x10001
    count = half + (total[1] & 0xFFFF) + (total[1] >> 16)
    return (low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16), count


@triton.jit
def row_places(marks):
    """(places, counts): where the lane's marked items of each of the CHUNKS start in it, and the chunks' numbers."""
    below, total = _counted(marks)
    places = (below[0] & 0xFFFF, below[0] >> 16, below[1] & 0xFFFF, below[1] >> 16)
    return places, (total[0] & 0xFFFF, total[0] >> 16, total[1] & 0xFFFF, total[1] >> 16)


@triton.jit
def _halves_side_by_side(words, odd):
    """The first and the last four of each lane's eight words, exchanged with the neighbour's so that the two lanes hold
    one octet between them: (the even lane's, the odd lane's)."""
    even_words = ()
    odd_words = ()
    for i in tl.static_range(4):
        other = tl.inline_asm_elementwise(
            _NEIGHBOUR, "=r,r", [tl.where(odd, words[i], words[4 + i])], dtype=tl.int32, is_pure=False, pack=1
        )
        even_words += (tl.where(odd, other, words[i]),)
        odd_words += (tl.where(odd, words[4 + i], other),)
    return even_words, odd_words


@triton.jit
def store_octets(x_ptr, words, offs, left, XB: tl.constexpr, WHOLE: tl.constexpr):
    """As store_octet, of a whole warp's neighbours, in whole sectors: for results written without as many reads."""
    if XB == 2:
        store_octet(x_ptr, words, offs, left, XB, WHOLE)
    else:
        odd = (offs & OCTET) != 0
        even_words, odd_words = _halves_side_by_side(words, odd)
        place = offs - tl.where(odd, OCTET // 2, 0)
        store_words(x_ptr + place, even_words, (offs & ~OCTET) + OCTET <= left)
        store_words(x_ptr + place + OCTET, odd_words, (offs | OCTET) + OCTET <= left)
        if not WHOLE:
            _store_rest(x_ptr, words, offs, left, XB)


@triton.jit
def store_octet(x_ptr, words, offs, left, XB: tl.constexpr, WHOLE: tl.constexpr):
    """The words to the elements (eight, or 16 bytes) from offs on of x_ptr (16-byte aligned), not past element left.
    WHOLE: left is a multiple of as many elements."""
    store_words(x_ptr + offs, words, offs + 4 * len(words) // XB <= left)
    if not WHOLE:
        _store_rest(x_ptr, words, offs, left, XB)


@triton.jit
def _store_rest(x_ptr, words, offs, left, XB: tl.constexpr):
    """The elements of words that end past element left, one by one."""
    ITEMS: tl.constexpr = 4 * len(words) // XB
    if left % ITEMS != 0:
        for i in tl.static_range(ITEMS):
            item = item_of(words, 0, i, XB).to(x_ptr.dtype.element_ty, bitcast=True)
            tl.store(x_ptr + offs + i, item, (offs + i < left) & (offs + ITEMS > left))
