"""Stashes in a narrow format, step after step for tensors of one kind."""

from __future__ import annotations

import torch

from gistkit.codecs import CODECS, Encoded, Narrow
from gistkit.ir import Decision
from gistkit.kernels import Narrows
from gistkit.nn.eligible import KERNEL_DTYPES
from gistkit.runtime.stash.stash import CodedBody, covers


class NarrowBody(CodedBody):
    """A payload of codes (and exponents) that is decoded by a launch made once; ``nbytes`` is what all of its kind
    take."""

    def __init__(self, encoded: Encoded, narrows: Narrows, nbytes: int) -> None:
        self.encoded, self._narrows, self._nbytes = encoded, narrows, nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def dense(self) -> torch.Tensor:
        return self._narrows.decode(*self.encoded.payload)


class Narrowing:
    """Makes such stashes of tensors of x's kind that fill their storage."""

    __slots__ = ("_codec", "_narrows", "_nbytes")

    def __init__(self, codec: Narrow, x: torch.Tensor) -> None:
        self._codec, self._narrows = codec.name, Narrows(x, codec.fmt.name, codec.scaling)
        self._nbytes = codec.predicted_bytes(x.numel(), x.dtype)

    @staticmethod
    def of(decision: Decision, x: torch.Tensor) -> Narrowing | None:
        """That of a decision; None where the codec has codes that are packed or scaled by what all of them are, or
        does not take x."""
        codec = CODECS.get(decision.codec)
        if not isinstance(codec, Narrow) or codec.fmt.codes_per_word == 3 or codec.scaling == "tensor":
            return None
        able = decision.place == "device" and x.dtype in KERNEL_DTYPES and x.numel() and covers(x)
        return Narrowing(codec, x) if able and codec.accepts(x) is None else None

    def __call__(self, x: torch.Tensor) -> NarrowBody:
        x = x.detach()
        return NarrowBody(Encoded(self._codec, self._narrows.encode(x), x), self._narrows, self._nbytes)


__all__ = ["NarrowBody", "Narrowing"]
