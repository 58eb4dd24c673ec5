"""Bit layouts of every encoding, as plain numbers: no tensor is touched here.

All layouts are in **storage order** of the encoded tensor: element 0 is the one at the lowest address, whatever the
shape and the (dense, non-overlapping) strides say.

| codec | layout |
|---|---|
| `mask1` | bit j of byte i is element 8i+j |
| `argmax4` | one nibble a pool output, low nibble first: position in the window; 15 = no gradient after a ReLU |
| `argmax8` | one byte a pool output; 255 = no gradient after a ReLU |
| `csr` | rows of 256 elements: an int16 count a row, 1-byte column indices, values |
| `zvc` | slots of 1024 elements: 32 mask words of 32 bits (bit b of word w is element 32w+b), an int16 count, values |
| `fp16`, `fp10`, `fp8` | 1-5-10, 1-5-4 (bias 15), 1-4-3 (bias 7) |
| `fp…s` | scaled by a power of two per 128 elements, one exponent byte each, subnormals kept |
| `int4s`, `int2s` | blocks of 256: 64 units of elements i, i+64, i+128, i+192 in 16 or 8 bits; fp32 low and step |

fp10 packs three codes to a 32-bit word in *planes*: with W words, word i holds elements i (bits 0-9), i+W (bits 10-19)
and i+2W (bits 20-29). W is rounded up to a multiple of 128, so that planes start at aligned addresses and at blocks
of a scale: up to 508 bytes a tensor more. "Non-zero" in `csr` and `zvc` is by bit pattern: -0.0 and NaN are values.

Sources: Gist (Jain et al., ISCA 2018, IV-A), cDMA (Rhu et al., HPCA 2018); what they leave open: docs/kernels.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

CSR_COLUMNS = 256
ZVC_SLOT = 1024
ZVC_WORDS = ZVC_SLOT // 32
SCALE_BLOCK = 128
INT_BLOCK = 256
INT_UNITS = INT_BLOCK // 4
ARGMAX4_POSITIONS = 16
ARGMAX8_POSITIONS = 256
ARGMAX4_NONE = 15
ARGMAX8_NONE = 255


def ceil_div(a: int, b: int) -> int:
    """The least integer not below a / b (a >= 0, b > 0)."""
    return -(-a // b)


def fp10_words(n: int) -> int:
    """32-bit words of n fp10 codes, three to a word: a plane is a whole number of scale blocks."""
    return ceil_div(n, 3 * SCALE_BLOCK) * SCALE_BLOCK


@dataclass(frozen=True)
class FloatFormat:
    """A narrow float. ``max_finite``: the largest finite value, ``max_code`` its code; codes from ``first_nan_code`` on
    are NaN, ``nan_code`` is the positive quiet one (codes without their sign); what is between is infinity."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_finite: float
    codes_per_word: int
    max_exponent: int  # floor(log2(max_finite))
    max_code: int
    first_nan_code: int
    nan_code: int

    @property
    def bits(self) -> int:
        """Bits of one code: sign + exponent + mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value; what rounds below it becomes zero in the unscaled forms."""
        return 2.0 ** (1 - self.bias)

    @property
    def relative_error(self) -> float:
        """Share of itself by which rounding may move a value in the normal range."""
        return 2.0 ** -(self.mantissa_bits + 1)

    def packed_bytes(self, n: int) -> int:
        return fp10_words(n) * 4 if self.codes_per_word == 3 else n * self.bits // 8


FP16 = FloatFormat("fp16", 5, 10, 15, 65504.0, 2, 15, 0x7BFF, 0x7C01, 0x7E00)
FP10 = FloatFormat("fp10", 5, 4, 15, 63488.0, 3, 15, 0x1EF, 0x1F1, 0x1F8)
FP8 = FloatFormat("fp8", 4, 3, 7, 448.0, 4, 8, 0x7E, 0x7F, 0x7F)
FLOAT_FORMATS = {f.name: f for f in (FP16, FP10, FP8)}
SCALINGS = ("none", "block")
VALUE_FORMS = {
    name + suffix: (fmt, scaling)
    for suffix, scaling in (("", "none"), ("s", "block"))
    for name, fmt in FLOAT_FORMATS.items()
}
"""Narrow floats by the name that callers give them: (format, scaling)."""
INT_FORMS = {"int4s": 4, "int2s": 2}
"""Bits of integers that are rounded at random, by the name that callers give them."""
LOSSY_FORMS = (*VALUE_FORMS, *INT_FORMS)
"""All that ``lossy`` may name."""
DEFAULT_LOSSY = "int4s"
"""What ``lossy=True`` names: of the formats that lost no accuracy in docs/accuracy.md the one of fewest bits."""
AUTO = "auto"
"""What ``lossy`` may be instead where steps of a real model are measured: a format for each storage."""
MAX_ERROR = 0.04
"""Of the gradients, under ``auto``: the largest with which ResNet-20 was as good as in fp32 (docs/accuracy.md)."""
Lossy = str | Mapping[int, str] | None
"""What is rounded: all to one format, each storage to its own (exact where it has none), nothing."""


def named(lossy: str | bool | None) -> str | None:
    """The caller's word for a format, where True is DEFAULT_LOSSY and False is None."""
    return DEFAULT_LOSSY if lossy is True else None if lossy is False else lossy


def narrow_of(lossy: Lossy, storage: int) -> str | None:
    """The format of one storage, None where it stays exact."""
    return lossy.get(storage) if isinstance(lossy, Mapping) else lossy


def value_bits(name: str) -> int:
    """Bits of one value in a form of LOSSY_FORMS, without scales."""
    return INT_FORMS[name] if name in INT_FORMS else VALUE_FORMS[name][0].bits


def mask1_bytes(n: int) -> int:
    """Bytes of an n-element 1-bit mask."""
    return ceil_div(n, 8)


def argmax_bytes(n_outputs: int, bits: int) -> int:
    """Bytes of a max-pool map of n_outputs codes of 4 or 8 bits."""
    return ceil_div(n_outputs * bits, 8)


def scale_count(n: int, scaling: str) -> int:
    """Exponent bytes that ride beside n codes under a scaling of SCALINGS."""
    return {"none": 0, "block": ceil_div(n, SCALE_BLOCK)}[scaling]


def narrow_bytes(fmt: FloatFormat, scaling: str, n: int) -> int:
    """Bytes of n narrow codes with their exponent bytes."""
    return fmt.packed_bytes(n) + scale_count(n, scaling)


def int_bytes(bits: int, n: int) -> int:
    """Bytes of n integers in whole blocks, with each block's low and step."""
    return ceil_div(n, INT_BLOCK) * (INT_BLOCK * bits // 8 + 8)


def zvc_meta_bytes(n: int) -> int:
    """Bytes of zvc's mask words and counts for n elements (values come on top)."""
    slots = ceil_div(n, ZVC_SLOT)
    return slots * (ZVC_WORDS * 4 + 2)


def csr_meta_bytes(n: int, nonzeros: int) -> int:
    """Bytes of csr's row counts and column indices for n elements of which nonzeros are stored."""
    return ceil_div(n, CSR_COLUMNS) * 2 + nonzeros


@cache
def item_bytes(dtype: str) -> int:
    """Bytes of one element of a torch dtype by its name: 2 for ``bfloat16``, 1 for ``bool`` and ``float8_e4m3fn``."""
    bits = re.search(r"[0-9]+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1
