"""Scratch memory, in bytes, of verifying under a budget that a storage came back bit for bit.

The runtime compares in parts (:mod:`gistkit.runtime.stash.verify`), so that the first step of a shape, in which
everything is verified, stays within the plan's peak as well.
"""

from __future__ import annotations

from gistkit.formats import ceil_div

WORD_BYTES = 8
"""A digest sums 64-bit words."""
_PARTS, _LEAST_PART_BYTES = 64, 512
_ARITHMETIC_COPIES = 4
"""Bytes of a part, widened to fp32, that a batch norm's arithmetic holds, in those of the part."""


def part_bytes(nbytes: int) -> int:
    """Bytes of one of the parts in which a storage of ``nbytes`` is compared."""
    return min(nbytes, max(_LEAST_PART_BYTES, ceil_div(nbytes, _PARTS)))


def digest_bytes(nbytes: int, rows: int) -> int:
    """Scratch of a digest: a part as words, its weights, and a few words a row."""
    return 2 * (part_bytes(nbytes) + WORD_BYTES * rows) + 4 * WORD_BYTES * rows


def arithmetic_bytes(nbytes: int, dtype: str) -> int:
    """Scratch of making a batch norm's output anew by PyTorch's operators: what a part takes besides the output
    (nn.norm.Bound.widens)."""
    return 0 if dtype == "float32" else _ARITHMETIC_COPIES * part_bytes(nbytes)
