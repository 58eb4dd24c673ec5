"""Host memory for the elements of sparse encodings that are more than were forecast: pinned, for the worst case. In the
usual case nothing is written there, and the encoding lets go of it when the count has arrived.

**Reuse without events.** A span is a tensor, and free again when that tensor dies, on its own stream only, as
PyTorch's allocator keeps device memory: the stream's order puts the new owner's writes behind the last reads. Sizes are
powers of two, which is what PyTorch pins, and a free span serves requests of its size.

**Threads.** A span dies in whatever thread, even within a garbage collection that this module itself has set off: that
only appends its memory to a list, which the next :meth:`Spill.take` empties under its lock. PyTorch's pinned allocator
is told that kernels write to a span (:func:`gistkit.runtime.offload.host_memory.pinned`), so an engine may go any time.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gistkit.runtime.offload.host_memory import available_bytes, pinned
from gistkit.runtime.sparse_sizes.counts import Stream, stream_of

LEAST_BYTES = 2**18
"""The smallest span."""
SHARE = 4
"""One part in so many of the host's free memory may be pinned for spans."""
NO_MEMORY = "the host has no memory left for what may be more than forecast"


def most_bytes(device: torch.device, held_bytes: int) -> int:
    """The most that may be pinned for a device by someone who has ``held_bytes`` already: a quarter of what the host
    has free, and no more than the device has memory."""
    of_host = (available_bytes() + held_bytes) // SHARE
    return min(of_host, torch.cuda.get_device_properties(device).total_memory)


class Spill:
    """Host memory for one engine's encodings; safe to use from several threads. ``make`` gives memory that a device can
    write to (raising RuntimeError where there is none), ``limit`` the most bytes of it for a device and the bytes held
    already: a test's own, where there is no device."""

    def __init__(
        self,
        make: Callable[[int, torch.device], torch.Tensor] = pinned,
        limit: Callable[[torch.device, int], int] = most_bytes,
    ) -> None:
        self._make, self._limit = make, limit
        self.held_bytes = 0
        """Host memory that is pinned."""
        self._free: defaultdict[tuple[Stream, int], list[torch.Tensor]] = defaultdict(list)
        self._ended: deque[tuple[tuple[Stream, int], torch.Tensor]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int, x: torch.Tensor) -> torch.Tensor | None:
        """Memory for an encoding of x on its device's current stream: uint8, ``nbytes`` or more, free again when this
        very tensor dies; None where there is none. Never waits for the device, but pinning more memory takes time."""
        size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
        key = (stream_of(x), size)
        with self._lock:
            self._collect()
            free = self._free[key]
            memory = free.pop() if free else self._made(size, x.device)
        if memory is None:
            return None
        span = memory[:]
        # without self, so that no cycle keeps the memory beyond this object's own life
        weakref.finalize(span, self._ended.append, (key, memory)).atexit = False
        return span

    def _collect(self) -> None:
        while self._ended:
            key, memory = self._ended.popleft()
            self._free[key].append(memory)

    def _made(self, size: int, device: torch.device) -> torch.Tensor | None:
        """One span more; where the limit is reached, in place of those that are free."""
        left_bytes = self._limit(device, self.held_bytes) - self.held_bytes
        if size > left_bytes:
            free_bytes = sum(length * len(spans) for (_, length), spans in self._free.items())
            if size > left_bytes + free_bytes:
                return None
            self._free.clear()
            self.held_bytes -= free_bytes
        try:
            with _disable_current_modes():
                memory = self._make(size, device)
        except RuntimeError:  # out of memory, in PyTorch's words for pinned memory
            return None
        self.held_bytes += size
        return memory
