"""Bits compared in little memory: digests of a tensor's rows, and the blocks that a tensor is looked at in.

Under a budget forward has no room for a rebuild beside its original. Forward takes a digest of the bits; the first use
in backward makes the same digest of what came back, before anybody reads it. A row's digest is a sum of its words times
random 64-bit weights, modulo 2**64, for one block of columns after the other (multilinear hashing: Carter and Wegman,
1979); a word that differs goes unseen with a chance of at most 2**-33, and one in its low half with 2**-49.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Digest:
    """The digests of a tensor's rows, where its rows lie one after the other, else of all of it, as of a flat one;
    kept on the host.

    Making and comparing synchronise with the device."""

    def __init__(self, x: torch.Tensor) -> None:
        in_order = x.dim() > 1 and x.numel() > 0 and x.stride(0) * x.shape[0] == x.numel()
        self._rows = x.shape[0] if in_order else 1
        self._columns = max(1, part_bytes(x.numel() * x.element_size()) // WORD_BYTES // self._rows)
        self._words = _words(x, self._rows, self._columns)

    def matches(self, values: torch.Tensor) -> bool:
        """Whether values are bit for bit those of the tensor, in its memory order."""
        values = values if is_dense(values) else values.contiguous()
        return _words(values, self._rows, self._columns) == self._words


@torch.no_grad()
def _words(x: torch.Tensor, rows: int, columns: int) -> list[int]:
    """The digests of x (dense) seen as so many rows, ``columns`` at a time."""
    bits = flat(x.detach()).view(_INTEGERS[x.element_size()]).view(rows, -1) if x.numel() else x.new_empty(rows, 0)
    generator = torch.Generator().manual_seed(0x6715)
    weights = torch.randint(-(2**63), 2**63 - 1, (columns,), generator=generator).to(x.device)
    total = torch.zeros(rows, dtype=torch.int64, device=x.device)
    for start in range(0, bits.shape[1], columns):
        part = bits[:, start : start + columns].to(torch.int64, copy=True)
        total.mul_(_NEXT_BLOCK).add_(part.mul_(weights[: part.shape[1]]).sum(1))
        del part
    return total.tolist()


class Trial:
    """Rebuilds a tensor in the first of several ways that is exact, and hands nothing on that is not. ``found`` is
    called with that way's number; or with None where none is exact, and must raise then."""

    def __init__(
        self, ways: list[Callable[[], torch.Tensor]], digest: Digest, found: Callable[[int | None], None]
    ) -> None:
        self._ways, self._digest, self._found = ways, digest, found
        self._exact = False

    def dense(self) -> torch.Tensor:
        """The tensor, exact."""
        if self._exact:
            return self._ways[0]()
        for number, way in enumerate(self._ways):
            values = way()
            if self._digest.matches(values):
                self._ways, self._exact = [way], True
                self._found(number)
                return values
            del values
        self._found(None)
        raise AssertionError("found() must raise where no way is exact")
