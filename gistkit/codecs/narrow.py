"""Narrow floats: every element in 16, 10 or 8 bits (Gist section IV-A, delayed precision reduction)."""

from __future__ import annotations

import torch

from gistkit import formats
from gistkit.codecs.base import Codec, Encoded, dense_layout, restored
from gistkit.codecs.bounds import ErrorBound
from gistkit.kernels import flat, ops


class Narrow(Codec):
    """All elements in one narrow format; payload (codes, exponents)."""

    def __init__(self, name: str, fmt: formats.FloatFormat, scaling: str) -> None:
        super().__init__(name)
        self.fmt, self.scaling = fmt, scaling
        self.error_bound = ErrorBound(fmt, scaling)

    def _encode(self, x: torch.Tensor) -> Encoded:
        x = dense_layout(x)
        return Encoded(self.name, tuple(ops.narrow_encode(flat(x), self.fmt.name, self.scaling)), x)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        codes, exponents = encoded.payload
        values = ops.narrow_decode(codes, exponents, encoded.numel, encoded.dtype, self.fmt.name, self.scaling)
        return restored(values, encoded)

    def decode_range(self, encoded: Encoded, start: int, stop: int) -> torch.Tensor:
        if self.fmt.codes_per_word == 3:  # planes: neighbours lie in different words
            return super().decode_range(encoded, start, stop)
        codes, exponents = encoded.payload
        first = start - start % formats.SCALE_BLOCK
        if self.scaling == "block":
            exponents = exponents[first // formats.SCALE_BLOCK : formats.ceil_div(stop, formats.SCALE_BLOCK)]
        form = (encoded.dtype, self.fmt.name, self.scaling)
        values = ops.narrow_decode(codes[first:stop], exponents, stop - first, *form)
        return values[start - first :]
