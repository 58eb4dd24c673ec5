"""Narrow floats as operators of a graph: fp16, fp10, fp8 and their scaled forms, which Inductor fuses.

The arithmetic, and so every code, is that of :mod:`gistkit.kernels.reference.narrow`; the blocks of 128 elements that
share an exponent byte lie in the order of the memory. Codes are computed with integers. On a GPU that converts to
float8 by itself (sm_89 on) fp8 and fp8s use that, to the same codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod

import torch
from torch import fx

from gistkit.compiled import compat, lowering
from gistkit.compiled.edit import Builder
from gistkit.compiled.operators import bounding, saturating, shortening
from gistkit.compiled.split import memory_order, value
from gistkit.formats import SCALE_BLOCK, VALUE_FORMS, FloatFormat, fp10_words

aten, prims = torch.ops.aten, torch.ops.prims
_INFINITY, _MAGNITUDE = 0x7F800000, 0x7FFFFFFF
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Narrow:
    """A narrow float of a float tensor. ``order``: its dimensions from the outermost in memory to the innermost;
    ``shape``: its sizes in that order, -1 for one that is symbolic; ``hardware``: codes by conversion to float8."""

    name: str
    fmt: FloatFormat
    scaled: bool
    order: Shape
    shape: Shape
    dtype: torch.dtype
    hardware: bool = False

    @property
    def _elements(self) -> int:
        """0 where one size is symbolic."""
        return 0 if -1 in self.shape else prod(self.shape)

    def encode(self, build: Builder, x: fx.Node) -> Sequence[fx.Node]:
        """(codes, and for a scaled form exponent bytes)."""
        op = _Arithmetic(build, self.fmt)
        wide = op.cast(_permuted(build, x, self.order), torch.float32)
        if not self.scaled:
            return [self._packed(op, op.hardware_codes(wide, flush=True) if self.hardware else op.codes(wide))]
        missing = -self._elements % SCALE_BLOCK
        if missing:
            wide = build(aten.constant_pad_nd.default, build(aten.reshape.default, wide, [-1]), [0, missing])
        wide = build(aten.reshape.default, wide, [-1, SCALE_BLOCK])
        compat.choose_blocks(lowering.scale_blocks)
        exponents = op.exponents(wide)
        factor = op.power_of_two(build(aten.neg.default, exponents), self.fmt.max_exponent + 127)
        if self.hardware:
            codes = op.hardware_codes(build(aten.mul.Tensor, wide, factor), flush=False)
        else:
            codes = op.scaled_codes(wide, factor)
        return [self._packed(op, codes), op.cast(exponents, torch.uint8)]

    def decode(self, build: Builder, payload: Sequence[fx.Node]) -> fx.Node:
        op = _Arithmetic(build, self.fmt)
        codes = self._unpacked(op, payload[0])
        values = op.cast(codes, torch.float32) if self.hardware else op.values(codes)
        if self.scaled:
            exponents = op.cast(payload[1], torch.int32)
            factor = op.power_of_two(exponents, -127 - self.fmt.max_exponent)
            if self._whole:
                factor = build(aten.reshape.default, build(aten.expand.default, factor, [-1, SCALE_BLOCK]), [-1])
            values, most = build(aten.mul.Tensor, values, factor), torch.finfo(self.dtype).max
            values = build(bounding(), values, most) if self.hardware else op.clamped(values, most)
        flat = values if self._whole else build(aten.reshape.default, values, [-1])
        if self._elements and value(flat).numel() != self._elements:
            flat = build(aten.slice.Tensor, flat, 0, 0, self._elements)
        back = build(aten.reshape.default, build(shortening(), op.cast(flat, self.dtype)), list(self.shape))
        return _permuted(build, back, [self.order.index(d) for d in range(len(self.order))])

    @property
    def _whole(self) -> bool:
        """Whether blocks of a scale fill the tensor, so that codes are kept flat and read by their index."""
        return self.scaled and self.fmt.codes_per_word != 3 and self._elements % SCALE_BLOCK == 0

    def _packed(self, op: _Arithmetic, codes: fx.Node) -> fx.Node:
        """int32 codes as they are kept."""
        if self._whole:
            codes = op.build(aten.reshape.default, codes, [-1])
        if self.hardware:
            return codes
        if self.fmt.codes_per_word == 3:
            return op.planes(codes, self._elements)
        return op.cast(codes, torch.int16 if self.fmt.bits == 16 else torch.uint8)

    def _unpacked(self, op: _Arithmetic, kept: fx.Node) -> fx.Node:
        if self.hardware:
            return kept
        if self.fmt.codes_per_word != 3:
            return op.cast(kept, torch.int32)
        flat = op.from_planes(kept, -(-self._elements // SCALE_BLOCK) * SCALE_BLOCK if self.scaled else self._elements)
        return op.build(aten.reshape.default, flat, [-1, SCALE_BLOCK] if self.scaled else list(self.shape))


@dataclass(frozen=True)
class Cast:
    """bf16 in place of fp32."""

    name: str = "bf16"

    def encode(self, build: Builder, x: fx.Node) -> Sequence[fx.Node]:
        return [build(prims.convert_element_type.default, x, torch.bfloat16)]

    def decode(self, build: Builder, payload: Sequence[fx.Node]) -> fx.Node:
        return build(prims.convert_element_type.default, payload[0], torch.float32)


class _Arithmetic:
    """The operations of :mod:`gistkit.kernels.reference.narrow` on int32 and float32 nodes."""

    def __init__(self, build: Builder, fmt: FloatFormat) -> None:
        self.build, self.f = build, fmt

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if value(x).dtype == dtype else self.build(prims.convert_element_type.default, x, dtype)

    def clamped(self, x: fx.Node, most: float) -> fx.Node:
        """Between -most and most, NaN as it is. Inductor has no rule for ``aten.clamp`` so late."""
        return self.build(aten.clamp_max.default, self.build(aten.clamp_min.default, x, -most), most)

    def bits(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.build(aten.view.dtype, x, dtype)

    def where(self, condition: fx.Node, some: float, other: fx.Node) -> fx.Node:
        return self.build(aten.where.ScalarSelf, condition, some, other)

    def shifted(self, x: fx.Node, right: int) -> fx.Node:
        """x >> right of an int32 that is not negative, x << -right."""
        if right < 0:
            return self.build(aten.mul.Tensor, x, 1 << -right)
        return self.build(aten.bitwise_right_shift.Tensor_Scalar, x, right)

    def power_of_two(self, exponent: fx.Node, more: int) -> fx.Node:
        """2**(exponent + more), of int32 exponents; the result is a normal number."""
        return self.bits(self.shifted(self.build(aten.add.Tensor, exponent, 127 + more), -23), torch.float32)

    def magnitude(self, wide: fx.Node) -> fx.Node:
        return self.build(aten.bitwise_and.Scalar, self.bits(wide, torch.int32), _MAGNITUDE)

    def rounded(self, magnitude: fx.Node) -> fx.Node:
        shift = 23 - self.f.mantissa_bits
        odd = self.build(aten.bitwise_and.Scalar, self.shifted(magnitude, shift), 1)
        total = self.build(aten.add.Tensor, self.build(aten.add.Tensor, odd, magnitude), (1 << (shift - 1)) - 1)
        return self.shifted(total, shift)

    def _on_grid(self, magnitude: fx.Node) -> fx.Node:
        return self.build(aten.sub.Tensor, self.rounded(magnitude), (127 - self.f.bias) << self.f.mantissa_bits)

    def codes(self, wide: fx.Node) -> fx.Node:
        magnitude = self.magnitude(wide)
        code = self._on_grid(magnitude)
        code = self.where(self.build(aten.lt.Scalar, code, 1 << self.f.mantissa_bits), 0, code)
        return self._finished(code, wide, magnitude)

    def scaled_codes(self, wide: fx.Node, factor: fx.Node) -> fx.Node:
        """Codes of wide * factor, subnormals kept."""
        f, build = self.f, self.build
        scaled = build(aten.mul.Tensor, self.bits(self.magnitude(wide), torch.float32), factor)
        magnitude = self.bits(scaled, torch.int32)
        exponent = 1 - f.bias - f.mantissa_bits + 23
        steps = self.bits(build(aten.add.Tensor, scaled, 2.0**exponent), torch.int32)
        steps = build(aten.sub.Tensor, steps, (exponent + 127) << 23)
        code = build(aten.where.self, build(aten.lt.Scalar, scaled, f.min_normal), steps, self._on_grid(magnitude))
        return self._finished(code, wide, magnitude)

    def _finished(self, code: fx.Node, wide: fx.Node, magnitude: fx.Node) -> fx.Node:
        build = self.build
        code = build(aten.clamp_max.default, code, self.f.max_code)
        code = self.where(build(aten.gt.Scalar, magnitude, _INFINITY), self.f.nan_code, code)
        negative = self.cast(build(aten.lt.Scalar, self.bits(wide, torch.int32), 0), torch.int32)
        return build(aten.bitwise_or.Tensor, code, self.shifted(negative, 1 - self.f.bits))

    def hardware_codes(self, wide: fx.Node, flush: bool) -> fx.Node:
        """float8_e4m3fn; ``flush``: zeros for what rounds below the least normal number."""
        if flush:  # half a unit of the grid below the least normal number is still rounded up to it
            least = self.f.min_normal * (1 - 2.0 ** -(self.f.mantissa_bits + 2))
            small = self.build(aten.lt.Scalar, self.build(aten.abs.default, wide), least)
            wide = self.build(aten.where.self, small, self.build(aten.mul.Tensor, wide, 0.0), wide)
        return self.build(saturating(), wide)

    def exponents(self, wide: fx.Node) -> fx.Node:
        """The exponent byte of every row, int32."""
        f, build, magnitude = self.f, self.build, self.magnitude(wide)
        finite = self.where(build(aten.ge.Scalar, magnitude, _INFINITY), 0, magnitude)
        largest = build(aten.amax.default, finite, [1], True)
        largest.meta[lowering.SCALES] = True
        no_room = (1 << f.mantissa_bits) - 1 - (f.max_code & ((1 << f.mantissa_bits) - 1))
        b = self.shifted(build(aten.add.Tensor, self.rounded(largest), no_room), f.mantissa_bits)
        return self.where(build(aten.eq.Scalar, largest, 0), 127, build(aten.clamp_min.default, b, f.max_exponent + 1))

    def values(self, codes: fx.Node) -> fx.Node:
        """float32 of codes, without a scale."""
        f, build = self.f, self.build
        code = build(aten.bitwise_and.Scalar, codes, (1 << (f.bits - 1)) - 1)
        step = 2.0 ** (1 - f.bias - f.mantissa_bits)
        subnormal = build(aten.mul.Tensor, self.cast(code, torch.float32), step)
        normal = build(aten.add.Tensor, self.shifted(code, f.mantissa_bits - 23), (127 - f.bias) << 23)
        small = build(aten.lt.Scalar, code, 1 << f.mantissa_bits)
        size = build(aten.where.self, small, subnormal, self.bits(normal, torch.float32))
        size = self.where(build(aten.ge.Scalar, code, f.first_nan_code), float("nan"), size)
        sign = build(aten.bitwise_and.Scalar, codes, 1 << (f.bits - 1))  # not by neg: Triton's 0 - 0 has no sign
        return build(aten.where.self, build(aten.ne.Scalar, sign, 0), build(aten.mul.Tensor, size, -1.0), size)

    def planes(self, codes: fx.Node, elements: int) -> fx.Node:
        """Three codes to an int32 word."""
        words, build = fp10_words(elements), self.build
        flat = build(aten.reshape.default, codes, [-1])
        flat = build(aten.constant_pad_nd.default, flat, [0, 3 * words - value(flat).numel()])
        parts = [build(aten.slice.Tensor, flat, 0, i * words, (i + 1) * words) for i in range(3)]
        shifted = [self.shifted(part, -10 * i) if i else part for i, part in enumerate(parts)]
        return reduce(partial(build, aten.bitwise_or.Tensor), shifted)

    def from_planes(self, words: fx.Node, elements: int) -> fx.Node:
        """The first codes of :meth:`planes`' words, flat."""
        parts = [self.build(aten.bitwise_and.Scalar, self.shifted(words, 10 * i), 0x3FF) for i in range(3)]
        return self.build(aten.slice.Tensor, self.build(aten.cat.default, parts, 0), 0, 0, elements)


def _permuted(build: Builder, x: fx.Node, order: Sequence[int]) -> fx.Node:
    return x if list(order) == sorted(order) else build(aten.permute.default, x, list(order))


def narrow(name: str, x: torch.Tensor, channels_last: bool = False) -> Narrow | str:
    """The narrow form of that name for a tensor, or why it has none. ``channels_last``: images will lie so."""
    fmt, scaling = VALUE_FORMS[name]
    if fmt.bits >= 8 * x.element_size():
        return f"{name} takes as many bits as {x.dtype}"
    symbolic = [d for d in range(x.dim()) if not isinstance(x.shape[d], int)]
    if len(symbolic) > 1:
        return "several sizes change from call to call"
    order = memory_order(x, channels_last)
    shape = tuple(-1 if d in symbolic else int(x.shape[d]) for d in order)
    known = prod(d for d in shape if d >= 0)
    if symbolic and (fmt.codes_per_word == 3 or (scaling == "block" and known % SCALE_BLOCK)):
        return f"{name} needs a size that is known, and one changes from call to call"
    hardware = fmt.name == "fp8" and converts_to_float8(x.device)
    return Narrow(name, fmt, scaling == "block", order, shape, x.dtype, hardware)


def converts_to_float8(device: torch.device) -> bool:
    """Whether a device converts to float8 by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
