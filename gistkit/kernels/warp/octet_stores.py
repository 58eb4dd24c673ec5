"""Results that leave a warp in wide stores: eight neighbours a lane, or 16 bytes beside the neighbouring lane's.

A 16-byte store of a lane that holds eight fp32 elements fills half of a 32-byte sector. Beside as many reads that costs
nothing; where little is read, a csr decode of fp32 at a density of 0.1 took 231 us on an H200 that way, and 158 with
stores of whole sectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.kernels.warp.octets import OCTET, item_of, store_words

_NEIGHBOUR = tl.constexpr("shfl.sync.bfly.b32 $0, $1, 1, 31, 0xffffffff;")


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
    """As store_octet, of a whole warp's neighbours, each store of which fills sectors: for results that are written
    without as much being read."""
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
    """The words to the elements (eight, or 16 bytes of them) from offs on of x_ptr (16-byte aligned), no further than
    element left.

    WHOLE: left is a multiple of as many elements.
    """
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
