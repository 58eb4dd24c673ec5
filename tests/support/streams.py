"""A device whose streams run late and in any order that events allow, and whose memory is poisoned when it changes
hands: a backend for the offloader under test.

Nothing that is enqueued runs before the adversary, a random generator, lets it. As with PyTorch's allocator, a block
belongs to the pool of one stream: the work of its last owner is still in that stream's queue when the block is handed
out (``_begin``), and the work of the next owner follows in that queue when it is dropped (``_end``). What touches a
block outside of that is a violation, whatever the bytes say.
"""

import random
import weakref
from collections import deque

import numpy as np
import torch

from gistkit.codecs import Encoded

POISON = 0xA5


class Event:
    """Happens when its stream gets there."""

    happened = False


class Block:
    """Bytes of the device (of one stream's pool), or of the host. ``usable``: between its owner's first and last."""

    def __init__(self, nbytes: int, stream: str | None) -> None:
        self.raw = np.full(nbytes, POISON, np.uint8)
        self.stream, self.usable = stream, False
        self.base = self.raw.__array_interface__["data"][0]


class Streams:
    """The backend. ``pace``: the share of calls at which something runs."""

    device = torch.device("cpu")
    d2h, h2d = "d2h", "h2d"

    def __init__(self, seed: int, device_bytes: int = 2**30, host_bytes: int = 2**30) -> None:
        self._random = random.Random(seed)
        self._queues: dict[str, deque] = {name: deque() for name in ("c0", "c1", "d2h", "h2d")}
        self._pace = self._random.choice((0.0, 0.1, 0.5, 1.0))
        self._order = self._random.sample(list(self._queues), 4)
        self._blocks: list[Block] = []
        self.current, self.device_bytes, self.host_bytes = "c0", device_bytes, host_bytes
        self.violations: list[str] = []
        self.synchronized = 0

    def compute(self) -> str:
        return self.current

    def empty(self, nbytes: int, stream: str) -> torch.Tensor:
        if nbytes > self.device_bytes - self.held_bytes(False):
            raise torch.OutOfMemoryError(f"{nbytes} bytes wanted")
        block, visible = self._block(nbytes, stream)
        self._queues[stream].append(lambda: self._begin(block))
        return visible

    def run(self, stream: str, kernel, *tensors: torch.Tensor) -> None:
        aliases = [self._alias(t) for t in tensors]

        def op() -> None:
            for block, _ in aliases:
                if not block.usable:
                    self.violations.append(f"{stream}: {kernel} touches memory that is not its owner's")
            kernel(*[t for _, t in aliases])

        self._queues[stream].append(op)
        self._progress()

    def record(self, stream: str) -> Event:
        event = Event()
        self._queues[stream].append(lambda: setattr(event, "happened", True))
        self._progress()
        return event

    def wait(self, stream: str, event: Event) -> None:
        self._queues[stream].append(event)
        self._progress()

    def follow(self, stream: str, other: str) -> None:
        self.wait(stream, self.record(other))

    def done(self, event: Event) -> bool:
        self._progress()
        return event.happened

    def pin(self, nbytes: int) -> torch.Tensor:
        assert nbytes <= self.free_host_bytes()
        block, visible = self._block(nbytes, None)
        block.usable = True
        return visible

    def unpin(self, memory: torch.Tensor) -> None:
        self._end(next(b for b in self._blocks if b.base == memory.data_ptr()))

    def free_host_bytes(self) -> int:
        return self.host_bytes - self.held_bytes(True)

    def synchronize(self) -> None:
        self.synchronized += 1
        while self._queues["d2h"] or self._queues["h2d"]:
            self._step()

    def finish(self) -> None:
        """Run all that is left."""
        while any(self._queues.values()):
            self._step()

    def held_bytes(self, host: bool) -> int:
        """Bytes that somebody holds, of the host's memory or the device's."""
        return sum(len(b.raw) for b in self._blocks if (b.stream is None) == host)

    def write(self, values: np.ndarray) -> torch.Tensor:
        """uint8 tensor of the current stream's pool, in which its work will write the values."""
        x = self.empty(max(len(values), 1), self.current)[: len(values)]
        self.run(self.current, lambda t: t.copy_(torch.from_numpy(values)), x)
        return x

    def holding(self, encoded: Encoded) -> Encoded:
        """The same encoding, its payload the device's, which nobody else holds."""
        return encoded.over(tuple(self.write(t.view(torch.uint8).numpy()).view(t.dtype) for t in encoded.payload))

    def _progress(self) -> None:
        if self._random.random() < self._pace:
            for _ in range(self._random.randrange(1, 4)):
                if any(self._queues.values()):
                    self._step()

    def _step(self) -> None:
        """One operation of a stream that may go on: of the favourite one, which changes now and then."""
        if self._random.random() < 0.15:
            self._random.shuffle(self._order)
        for name in self._order:
            queue = self._queues[name]
            while queue and isinstance(queue[0], Event) and queue[0].happened:
                queue.popleft()
            if queue and not isinstance(queue[0], Event):
                queue.popleft()()
                return
        assert not any(self._queues.values()), "all streams wait for each other"

    def _block(self, nbytes: int, stream: str | None) -> tuple[Block, torch.Tensor]:
        """A block and the tensor whose storage is its owner's hold."""
        block = Block(nbytes, stream)
        self._blocks.append(block)
        hold = block.raw[:]
        if stream is not None:
            weakref.finalize(hold, self._dropped, block)
        return block, torch.from_numpy(hold)

    def _dropped(self, block: Block) -> None:
        self._blocks.remove(block)
        self._queues[block.stream].append(lambda: self._end(block))

    def _begin(self, block: Block) -> None:
        block.raw.fill(POISON)
        block.usable = True

    def _end(self, block: Block) -> None:
        block.raw.fill(POISON)
        block.usable = False
        if block in self._blocks:
            self._blocks.remove(block)

    def _alias(self, t: torch.Tensor) -> tuple[Block, torch.Tensor]:
        """t's block, and t over it without being a hold."""
        address = t.data_ptr() if t.numel() else t.untyped_storage().data_ptr()
        block = next(b for b in self._blocks if b.base <= address < b.base + len(b.raw))
        same = torch.empty(0, dtype=t.dtype)
        storage = torch.from_numpy(block.raw).untyped_storage()
        return block, same.set_(storage, (address - block.base) // t.element_size(), t.shape, t.stride())
