"""Forms of a saved tensor as plain operators of PyTorch, which Inductor fuses into the kernels beside them.

``mask1`` is a torch.bool in 1 bit an element, ``map4`` a max-pool's position in its window in 4 bits. Codes lie side by
side in a byte along one dimension of the tensor, whose size is a known multiple of the codes in a byte; the payload has
that dimension divided and the others as they are, so sizes may be symbolic."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod

import torch
from torch import fx

from gistkit.compiled.edit import Builder
from gistkit.compiled.split import memory_order, origin, value

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Bits:
    """``bits`` of every element of a bool or int8 tensor, along dimension ``dim``; of a float one, a ReLU's output of
    which backward reads where it is positive, that: decoded to ones and zeros, so the kernels that compare it stay as
    they are. ``order``: the tensor's dimensions from the outermost in its graph's strides to the innermost; what is
    decoded has these, as its readers expect."""

    name: str
    bits: int
    dim: int
    dtype: torch.dtype
    order: tuple[int, ...]

    def encode(self, build: Builder, x: fx.Node) -> Sequence[fx.Node]:
        if self.dtype.is_floating_point:
            x = build(aten.le.Scalar, x, 0)
        parts, count = [], 8 // self.bits
        for i in range(count):
            part = build(aten.slice.Tensor, x, self.dim, i, sys.maxsize, count)
            part = build(prims.convert_element_type.default, part, torch.int32)
            parts.append(build(aten.mul.Tensor, part, 1 << (i * self.bits)) if i else part)
        packed = reduce(partial(build, aten.bitwise_or.Tensor), parts)
        return [build(prims.convert_element_type.default, packed, torch.uint8)]

    def decode(self, build: Builder, payload: Sequence[fx.Node]) -> fx.Node:
        codes, dim = build(aten.permute.default, payload[0], list(self.order)), self.order.index(self.dim)
        shape, count = build.sizes(codes), 8 // self.bits
        device, rank = value(codes).device, len(shape)
        words = {"start": 0, "step": self.bits, "dtype": torch.int32, "device": device, "requires_grad": False}
        shifts = build(prims.iota.default, count, **words)
        shifts = build(aten.reshape.default, shifts, [count] + [1] * (rank - 1 - dim))
        wide = build(aten.unsqueeze.default, build(prims.convert_element_type.default, codes, torch.int32), dim + 1)
        wide = build(aten.bitwise_right_shift.Tensor, wide, shifts)
        wide = build(aten.bitwise_and.Scalar, wide, (1 << self.bits) - 1)
        shape[dim] = shape[dim] * count
        wide = build(aten.reshape.default, wide, shape)
        wide = build(aten.permute.default, wide, [self.order.index(d) for d in range(rank)])
        if self.bits == 1:
            wide = build(aten.ne.Scalar, wide, 0)
        if self.dtype.is_floating_point:
            wide = build(aten.logical_not.default, wide)
        return wide if self.dtype is torch.bool else build(prims.convert_element_type.default, wide, self.dtype)

    def laid_out(self, x: torch.Tensor) -> Bits:
        """The form, which decodes an image x to channels_last."""
        return replace(self, order=memory_order(x, channels_last=True))


def packed(x: torch.Tensor, channels_last: bool = False) -> Bits | None:
    """The form of a tensor: 4 bits of an int8, a max-pool's map, 1 of a bool or float. Elements lie in a byte along
    that of the dimensions whose size is a known multiple of them which is the innermost in memory, so that neighbours
    read the same byte; None where there is none. ``channels_last``: images will lie so, whatever their strides say."""
    name, bits = ("map4", 4) if x.dtype is torch.int8 else ("mask1", 1)
    order = memory_order(x, channels_last)
    fitting = [d for d in order if isinstance(n := x.shape[d], int) and n and n % (8 // bits) == 0]
    return Bits(name, bits, fitting[-1], x.dtype, memory_order(x)) if fitting else None


def window_positions(node: fx.Node) -> int | None:
    """Positions in the window of the max-pool that made a map; None for a node that is no such map."""
    pool = origin(node)
    if pool is node or node.args[1] != 1 or pool.target is not prims._low_memory_max_pool_with_offsets.default:
        return None
    return prod(pool.args[1])  # type: ignore[arg-type]
