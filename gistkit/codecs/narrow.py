"""Narrow floats: every element in 16, 10 or 8 bits (Gist section IV-A, delayed precision reduction)."""

from __future__ import annotations

import torch

from gistkit import formats
from gistkit.codecs.base import Codec, Encoded, dense_layout, restored
from gistkit.codecs.bounds import ErrorBound
from gistkit.kernels import flat, ops

ENCODERS = {"fp16": ops.fp16_encode, "fp10": ops.fp10_encode, "fp8": ops.fp8_encode}
DECODERS = {"fp16": ops.fp16_decode, "fp10": ops.fp10_decode, "fp8": ops.fp8_decode}


class Narrow(Codec):
    """All elements in one narrow format; payload (codes, exponents)."""

    def __init__(self, name: str, fmt: formats.FloatFormat, scaling: str) -> None:
        super().__init__(name)
        self.fmt, self.scaling = fmt, scaling
        self.error_bound = ErrorBound(fmt, scaling)

    def _encode(self, x: torch.Tensor) -> Encoded:
        x = dense_layout(x)
        return Encoded(self.name, tuple(ENCODERS[self.fmt.name](flat(x), self.scaling)), x)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        codes, exponents = encoded.payload
        values = DECODERS[self.fmt.name](codes, exponents, encoded.numel, encoded.dtype, self.scaling)
        return restored(values, encoded)

    def decode_range(self, encoded: Encoded, start: int, stop: int) -> torch.Tensor:
        if self.fmt.codes_per_word == 3:  # planes: neighbours lie in different words
            return super().decode_range(encoded, start, stop)
        codes, exponents = encoded.payload
        first = start - start % formats.SCALE_BLOCK
        if self.scaling == "block":
            exponents = exponents[first // formats.SCALE_BLOCK : formats.ceil_div(stop, formats.SCALE_BLOCK)]
        decode = DECODERS[self.fmt.name]
        values = decode(codes[first:stop], exponents, stop - first, encoded.dtype, self.scaling)
        return values[start - first :]
