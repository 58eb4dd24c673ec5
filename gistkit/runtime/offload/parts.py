"""Dense tensors one after the other in a run of bytes, and the copies that bring them there and back."""

from __future__ import annotations

import math
from functools import lru_cache
from operator import attrgetter, methodcaller
from typing import NamedTuple

import torch

from gistkit.runtime.offload.backends import CudaBackend, Direct

PART_ALIGNMENT_BYTES = 16
"""Of the tensors within one span, so that an arrival takes hardly more than they do; kernels load 16 bytes at once."""


_SHAPE, _STRIDE, _DTYPE = attrgetter("shape"), methodcaller("stride"), attrgetter("dtype")


class Part(NamedTuple):
    """One dense tensor within a run of bytes that begins ``start`` bytes before it."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    def over(self, memory: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """The tensor of the run from ``offset`` on of uint8 memory, which begins with its storage; no copy and no view,
        so that it has a version of its own."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        start = (offset + self.start) // self.dtype.itemsize
        return made.set_(memory.untyped_storage(), start, self.shape, self.stride)


def laid_out(tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Part, ...], int]:
    """Parts of dense tensors one after the other from multiples of 16 bytes on; the bytes of all, at least 1."""
    return _laid_out(*zip(map(_SHAPE, tensors), map(_STRIDE, tensors), map(_DTYPE, tensors), strict=True))


@lru_cache(maxsize=4096)
def _laid_out(*kinds: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> tuple[tuple[Part, ...], int]:
    parts, end = [], 0
    for shape, stride, dtype in kinds:
        start = -(-end // PART_ALIGNMENT_BYTES) * PART_ALIGNMENT_BYTES
        end = start + math.prod(shape) * dtype.itemsize
        parts.append(Part(start, shape, stride, dtype, end - start))
    return tuple(parts), max(end, 1)


class LayOut(Direct):
    """memory, *tensors: these, which have the parts' geometry, into the memory's run from ``offset`` on."""

    __slots__ = ("_offset", "_parts")

    def __init__(self, parts: tuple[Part, ...], offset: int) -> None:
        self._parts, self._offset = parts, offset

    def __call__(self, memory: torch.Tensor, *tensors: torch.Tensor) -> None:
        for part, tensor in zip(self._parts, tensors, strict=True):
            part.over(memory, self._offset).copy_(tensor)

    def enqueue(self, backend: CudaBackend, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        memory, *sources = tensors
        run = memory.data_ptr() + self._offset
        for part, source in zip(self._parts, sources, strict=True):
            if part.nbytes:
                backend.copy(run + part.start, source.data_ptr(), part.nbytes, stream)


class Bytes(Direct):
    """to, source: ``nbytes`` of uint8 memory, at least 1, from byte ``start`` of the source on."""

    __slots__ = ("_nbytes", "_start")

    def __init__(self, start: int, nbytes: int) -> None:
        self._start, self._nbytes = start, nbytes

    def __call__(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to[: self._nbytes].copy_(source[self._start : self._start + self._nbytes])

    def enqueue(self, backend: CudaBackend, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        to, source = tensors
        backend.copy(to.data_ptr(), source.data_ptr() + self._start, self._nbytes, stream)
