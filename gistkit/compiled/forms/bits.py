"""Forms of a saved tensor as plain operators of PyTorch, which Inductor fuses into the kernels beside them.

``mask1`` is a torch.bool in 1 bit an element, ``map4`` a max-pool's position in its window in 4 bits. Codes lie side by
side in a byte along one dimension of the tensor, whose size is a known multiple of the codes in a byte; the payload has
that dimension divided and the others as they are, so sizes may be symbolic.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any

import torch
from torch import fx

from gistkit.compiled.edit import Builder
from gistkit.compiled.split import memory_order, origin, value

aten, prims = torch.ops.aten, torch.ops.prims
MAP_POSITIONS = 16
"""Window positions that 4 bits tell apart."""


@dataclass(frozen=True)
class Bits:
    """``bits`` of every element of a bool or int8 tensor, along dimension ``dim``. ``order``: the tensor's dimensions
    from the outermost in its graph's strides to the innermost; what is decoded has these, as its readers expect."""

    name: str
    bits: int
    dim: int
    dtype: torch.dtype
    order: tuple[int, ...]

    @property
    def _codes(self) -> int:
        return 8 // self.bits

    def encode(self, build: Builder, x: fx.Node) -> Sequence[fx.Node]:
        parts = []
        for i in range(self._codes):
            part = build(aten.slice.Tensor, x, self.dim, i, sys.maxsize, self._codes)
            part = build(prims.convert_element_type.default, part, torch.int32)
            parts.append(build(aten.mul.Tensor, part, 1 << (i * self.bits)) if i else part)
        packed = reduce(partial(build, aten.bitwise_or.Tensor), parts)
        return [build(prims.convert_element_type.default, packed, torch.uint8)]

    def decode(self, build: Builder, payload: Sequence[fx.Node]) -> fx.Node:
        codes, dim = build(aten.permute.default, payload[0], list(self.order)), self.order.index(self.dim)
        shape = build.sizes(codes)
        device, rank = value(codes).device, len(shape)
        words = {"start": 0, "step": self.bits, "dtype": torch.int32, "device": device, "requires_grad": False}
        shifts = build(prims.iota.default, self._codes, **words)
        shifts = build(aten.reshape.default, shifts, [self._codes] + [1] * (rank - 1 - dim))
        wide = build(prims.convert_element_type.default, codes, torch.int32)
        wide = build(aten.unsqueeze.default, wide, dim + 1)
        wide = build(aten.bitwise_right_shift.Tensor, wide, shifts)
        wide = build(aten.bitwise_and.Scalar, wide, (1 << self.bits) - 1)
        shape[dim] = shape[dim] * self._codes
        wide = build(aten.reshape.default, wide, shape)
        wide = build(aten.permute.default, wide, [self.order.index(d) for d in range(rank)])
        if self.dtype is torch.bool:
            return build(aten.ne.Scalar, wide, 0)
        return build(prims.convert_element_type.default, wide, self.dtype)


@dataclass(frozen=True)
class Signs:
    """A ReLU's output of which backward reads where it is positive: ``bits`` of that; decoded to ones and zeros, so the
    kernels that compare it stay as they are."""

    bits: Bits
    dtype: torch.dtype
    name: str = "mask1"

    def encode(self, build: Builder, x: fx.Node) -> Sequence[fx.Node]:
        return self.bits.encode(build, build(aten.le.Scalar, x, 0))

    def decode(self, build: Builder, payload: Sequence[fx.Node]) -> fx.Node:
        above = build(aten.logical_not.default, self.bits.decode(build, payload))
        return build(prims.convert_element_type.default, above, self.dtype)


def laid_out(form: Any, x: torch.Tensor) -> Any:
    """The form, which decodes an image x to channels_last."""
    if isinstance(form, Signs):
        return replace(form, bits=laid_out(form.bits, x))
    return replace(form, order=memory_order(x, channels_last=True))


def signs(x: torch.Tensor, channels_last: bool = False) -> Signs | None:
    """That form of a float tensor, None where no dimension is a multiple of 8. ``channels_last``: images will lie so
    in memory, whatever their strides say here."""
    bits = mask1(x, channels_last)
    return None if bits is None else Signs(bits, x.dtype)


def packing_dim(x: torch.Tensor, codes: int, channels_last: bool = False) -> int | None:
    """The dimension along which ``codes`` elements go to a byte: of those whose size is a known multiple, the innermost
    in memory, so that neighbours read the same byte. None where there is none."""
    fitting = [d for d in memory_order(x, channels_last) if isinstance(n := x.shape[d], int) and n and n % codes == 0]
    return fitting[-1] if fitting else None


def mask1(x: torch.Tensor, channels_last: bool = False) -> Bits | None:
    """The 1-bit form of a bool tensor, None where no dimension is a multiple of 8."""
    return _form("mask1", 1, x, torch.bool, channels_last)


def map4(x: torch.Tensor, channels_last: bool = False) -> Bits | None:
    """The 4-bit form of a max-pool's map, None where no dimension is even."""
    return _form("map4", 4, x, x.dtype, channels_last)


def _form(name: str, bits: int, x: torch.Tensor, dtype: torch.dtype, channels_last: bool) -> Bits | None:
    dim = packing_dim(x, 8 // bits, channels_last)
    return None if dim is None else Bits(name, bits, dim, dtype, memory_order(x))


def window_positions(node: fx.Node) -> int | None:
    """Positions in the window of the max-pool that made a map; None for a node that is no such map."""
    pool = origin(node)
    if pool is node or node.args[1] != 1 or pool.target is not prims._low_memory_max_pool_with_offsets.default:
        return None
    return prod(pool.args[1])  # type: ignore[arg-type]
