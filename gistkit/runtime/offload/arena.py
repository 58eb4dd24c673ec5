"""Host memory of the offloader: spans of few pinned chunks.

A step needs its spans in stack order: backward reads first what forward has sent last. Spans are taken at the lowest
address where they fit and given back in any order, with free neighbours joined: in stack order that is a stack, and in
any other one a hole is used again. Nothing here waits for copies. A span that is given back may still be read, so
whoever takes one has to order its writes behind those reads (:mod:`gistkit.runtime.offload.offloader`).
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from gistkit.errors import HostMemoryError
from gistkit.runtime.offload.backends import Backend

ALIGNMENT_BYTES = 512
CHUNK_BYTES = 64 * 2**20
"""The least that the arena grows by."""
HOST_SHARE = 0.9
"""The share of the host's free memory that may be pinned."""


class Span:
    """Bytes ``start`` to ``stop`` of a chunk."""

    __slots__ = ("chunk", "start", "stop")

    def __init__(self, chunk: Chunk, start: int, stop: int) -> None:
        self.chunk, self.start, self.stop = chunk, start, stop

    def memory(self) -> torch.Tensor:
        return self.chunk.memory[self.start : self.stop]


class Chunk:
    """One piece of pinned memory, its free runs in order of address."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._free = [(0, memory.numel())]

    @property
    def used_bytes(self) -> int:
        return self.memory.numel() - sum(stop - start for start, stop in self._free)

    def take(self, nbytes: int) -> Span | None:
        """The first free run of so many bytes."""
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return Span(self, start, start + nbytes)
        return None

    def give(self, start: int, stop: int) -> None:
        free = self._free
        at = first = bisect_left(free, (start, stop))
        if at and free[at - 1][1] == start:
            first, start = at - 1, free[at - 1][0]
        if at < len(free) and free[at][0] == stop:
            at, stop = at + 1, free[at][1]
        free[first:at] = [(start, stop)]


class PinnedArena:
    """Spans of pinned memory: one chunk of ``nbytes``, and more of them when that does not do. Raises HostMemoryError,
    with the bytes, where the host has no more."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self._backend = backend
        self.chunks: list[Chunk] = []
        if nbytes:
            self._grown(-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)

    @property
    def pinned_bytes(self) -> int:
        return sum(chunk.memory.numel() for chunk in self.chunks)

    @property
    def used_bytes(self) -> int:
        return sum(chunk.used_bytes for chunk in self.chunks)

    def take(self, nbytes: int) -> Span:
        """A span of so many bytes, rounded up to 512."""
        nbytes = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for chunk in self.chunks:
            span = chunk.take(nbytes)
            if span is not None:
                return span
        span = self._grown(nbytes).take(nbytes)
        assert span is not None
        return span

    def close(self) -> None:
        """Unpin everything; no copies may be left."""
        while self.chunks:
            self._backend.unpin(self.chunks.pop().memory)

    def _grown(self, nbytes: int) -> Chunk:
        free_bytes = int(self._backend.free_host_bytes() * HOST_SHARE)
        size = max(nbytes, CHUNK_BYTES) if self.chunks else nbytes
        size = size if size <= free_bytes else nbytes
        if size > free_bytes:
            raise HostMemoryError(
                size, f"{free_bytes} bytes of it are free, and {self.pinned_bytes} bytes are pinned for this already"
            )
        self.chunks.append(Chunk(self._backend.pin(size)))
        return self.chunks[-1]
