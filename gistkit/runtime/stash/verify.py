"""Bits compared in little memory: digests of a tensor, and the blocks that it is looked at in.

Under a budget forward has no room for a rebuild beside its original. Forward takes a digest of the bits; the first use
in backward makes the same digest of what came back, before anybody reads it. A digest is a sum of the words times
random 64-bit weights, modulo 2**64, for one block after the other (multilinear hashing: Carter and Wegman, 1979); a
word that differs goes unseen with a chance of at most 2**-33, and one in its low half with 2**-49.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from gistkit.ir import WORD_BYTES, part_bytes
from gistkit.kernels import flat, is_dense

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_LARGEST_WORD = 8
_NEXT_BLOCK = 0x5851F42D4C957F2D
"""An odd number: what a block's sum counts less for every block behind it."""
Block = tuple[slice, ...]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where both hold the same bit patterns. Synchronises with the device."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    size = a.element_size()
    # words of the same size are viewed in any layout, without a copy
    words = (t.contiguous() if size > _LARGEST_WORD else t for t in (a, b))
    return torch.equal(*(t.view(_INTEGERS[size]) for t in words))


def blocks(x: torch.Tensor, nbytes: int) -> Iterator[Block]:
    """Indices that cut x, in storage order, into dense blocks of at most ``nbytes`` (one element at least)."""
    steps = list(x.shape)
    size = x.numel() * x.element_size()
    for dim in sorted(range(x.dim()), key=lambda d: -x.stride(d)):
        if size <= nbytes:
            break
        inner = size // x.shape[dim]
        steps[dim] = max(1, nbytes // inner)
        size = inner * steps[dim]
    starts = (range(0, n, step) for n, step in zip(x.shape, steps, strict=True))
    for first in product(*starts):
        yield tuple(slice(i, min(i + step, n)) for i, step, n in zip(first, steps, x.shape, strict=True))


@torch.no_grad()
def digest(x: torch.Tensor) -> int:
    """The digest of x's bits, in memory order. Synchronises with the device."""
    if not x.numel():
        return 0
    bits = flat(x.detach() if is_dense(x) else x.detach().contiguous()).view(_INTEGERS[x.element_size()])
    columns = max(1, part_bytes(x.numel() * x.element_size()) // WORD_BYTES)
    generator = torch.Generator().manual_seed(0x6715)
    weights = torch.randint(-(2**63), 2**63 - 1, (columns,), generator=generator).to(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, len(bits), columns):
        part = bits[start : start + columns].to(torch.int64, copy=True)
        total.mul_(_NEXT_BLOCK).add_(part.mul_(weights[: len(part)]).sum())
        del part
    return int(total)
