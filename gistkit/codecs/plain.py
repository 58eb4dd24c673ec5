"""Codecs of one step: the tensor itself, narrow floats and integers, bits, max-pool maps."""

from __future__ import annotations

import torch

from gistkit import formats
from gistkit.codecs.base import Codec, Encoded, aligned, check_grad, dense_layout, restored
from gistkit.kernels import flat, nibbles_pack, nibbles_unpack, ops
from gistkit.kernels.launch import direct


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


def unchanged(x: torch.Tensor, version: int) -> torch.Tensor:
    """x, if it is still at that version; else PyTorch's own error for a saved tensor."""
    if _version(x) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{x.type()} {list(x.shape)}] is at version {x._version}; expected version {version} instead."
        )
    return x


class Dense(Codec):
    """The tensor itself: no copy, any dtype, any strides. Decoding raises PyTorch's error where it was written to
    since."""

    def _encode(self, x: torch.Tensor) -> Encoded:
        return Encoded(self.name, (x,), x, extra=(_version(x),))

    def decode(self, encoded: Encoded) -> torch.Tensor:
        """The tensor itself, an alias. Raises RuntimeError where it was modified in place after encoding."""
        (x,), (version,) = encoded.payload, encoded.extra
        return unchanged(x, version)

    def relu_backward(self, encoded: Encoded, grad: torch.Tensor) -> torch.Tensor:
        x = self.decode(encoded)
        check_grad(grad, encoded)
        return torch.ops.aten.threshold_backward(grad, x, 0)


class Mask1(Codec):
    """One bit an element, not (x <= 0): all that a ReLU's backward needs (Gist section III-A, Binarize). Decodes to 1
    and 0."""

    def _encode(self, x: torch.Tensor) -> Encoded:
        x = dense_layout(x)
        return Encoded(self.name, (ops.mask1_encode(flat(x)),), x)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        """1 where the element was not <= 0 (NaN included), else 0; same shape, strides and dtype."""
        return restored(ops.bits_decode(encoded.payload[0], encoded.numel).to(encoded.dtype), encoded)

    def relu_backward(self, encoded: Encoded, grad: torch.Tensor) -> torch.Tensor:
        if grad.stride() == encoded.stride and grad.shape == encoded.shape:
            return direct.mask1_backward(grad, encoded.payload[0])
        ordered, ours = aligned(grad, encoded)
        if not ours:
            return restored(ops.mask1_backward(ordered, encoded.payload[0]), encoded)
        ops.mask1_backward_(ordered, encoded.payload[0])
        return restored(ordered, encoded)


class Narrow(Codec):
    """Every element in 16, 10 or 8 bits (Gist section IV-A, delayed precision reduction): (codes, exponents)."""

    def __init__(self, name: str, fmt: formats.FloatFormat, scaling: str) -> None:
        super().__init__(name)
        self.fmt, self.scaling = fmt, scaling
        self.relative_error = fmt.relative_error

    def _encode(self, x: torch.Tensor) -> Encoded:
        x = dense_layout(x)
        return Encoded(self.name, tuple(ops.narrow_encode(flat(x), self.fmt.name, self.scaling)), x)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        codes, exponents = encoded.payload
        values = ops.narrow_decode(codes, exponents, encoded.numel, encoded.dtype, self.fmt.name, self.scaling)
        return restored(values, encoded)


class Integers(Codec):
    """Every element in 4 or 2 bits between the ends of its block of 256, rounded at random without bias, as in ActNN:
    (units, lows, steps). A block with a NaN or an infinity decodes to NaN.

    The random numbers follow from the tensor itself and from the seed that ``torch.manual_seed`` set last: the same run
    gives the same codes, encoding again does too, and PyTorch's generators do not move.
    """

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name)
        self.bits = bits
        self.relative_error = 1 / ((1 << bits) - 1)

    def _encode(self, x: torch.Tensor) -> Encoded:
        x, seed = dense_layout(x), torch.initial_seed()
        seed = (seed ^ seed >> 24 ^ seed >> 48) & 0xFFFFFF
        return Encoded(self.name, tuple(ops.int_encode(flat(x), self.bits, seed)), x)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        return restored(ops.int_decode(*encoded.payload, encoded.numel, encoded.dtype, self.bits), encoded)


class Bits(Codec):
    """One bit an element of a torch.bool tensor: dropout masks and the like."""

    def _encode(self, x: torch.Tensor) -> Encoded:
        x = dense_layout(x)
        return Encoded(self.name, (ops.bits_encode(flat(x)),), x)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        return restored(ops.bits_decode(encoded.payload[0], encoded.numel), encoded)


class Argmax(Codec):
    """uint8 positions of a max-pool's maxima in their windows, in 4 or 8 bits each (Gist section IV-A, Y to X map).

    The pool operators emit this layout by themselves; the codec is for maps that come from elsewhere.
    """

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name)
        self.bits = bits

    def _encode(self, x: torch.Tensor) -> Encoded:
        x = dense_layout(x)
        positions = flat(x)
        if self.bits == 8:
            return Encoded(self.name, (positions.clone(),), x)
        if x.device.type == "cpu" and x.numel() and int(positions.max()) >= formats.ARGMAX4_POSITIONS:
            raise ValueError(
                f"codec {self.name}: x must hold window positions below {formats.ARGMAX4_POSITIONS}, "
                f"got {int(positions.max())}; use argmax8"
            )
        return Encoded(self.name, (nibbles_pack(positions),), x)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        (codes,) = encoded.payload
        if self.bits == 8:
            return restored(codes.clone(), encoded)
        return restored(nibbles_unpack(codes, encoded.numel), encoded)
