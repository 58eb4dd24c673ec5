"""What the offloader needs of a device: streams, events, memory of both sides, and work enqueued on a stream.

:class:`CudaBackend` is the CUDA form. :class:`Backend` itself is the software device of a machine without one: every
stream runs at once, so an event has always happened, and host memory is memory that a step's accounts leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gistkit.kernels import current_stream, torch_stream
from gistkit.runtime.offload.driver import NOT_READY, Driver, Events
from gistkit.runtime.offload.driver import Event as DriverEvent
from gistkit.runtime.offload.host_memory import available_bytes, pin, unpin

Stream = Any
Event = Any
Kernel = Callable[..., object]
"""Work on the tensors that it is called with; none of them is kept."""


class Backend:
    """The software device, and what is asked of any other. ``d2h`` and ``h2d`` are the two copy streams. No method but
    :meth:`synchronize`, :meth:`pin` and :meth:`unpin` waits for the device."""

    device = torch.device("cpu")
    d2h: Stream = "copies"
    h2d: Stream = "copies"

    def compute(self) -> Stream:
        """The stream on which the caller's work is enqueued now."""
        return "compute"

    def empty(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """uint8[nbytes] of the device's memory, from that stream's pool: work that the stream holds already may still
        use the same bytes, and when the tensor dies, work enqueued there afterwards may."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def run(self, stream: Stream, kernel: Kernel, *tensors: torch.Tensor) -> None:
        """Enqueue a kernel. The caller keeps the tensors alive until it has run."""
        with _disable_current_modes(), torch.no_grad():
            kernel(*tensors)

    def record(self, stream: Stream) -> Event:
        """An event that happens when all that the stream holds now has run."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on the stream from now on runs after the event."""

    def follow(self, stream: Stream, other: Stream) -> None:
        """What is enqueued on the stream from now on runs after all that the other one holds now."""

    def done(self, event: Event) -> bool:
        """Whether the event has happened."""
        return True

    def pin(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of host memory that the copy streams can address. Raises HostMemoryError where there is none.
        Slow, and may wait for the device: not for a steady step."""
        with _disable_current_modes():
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def unpin(self, memory: torch.Tensor) -> None:
        """Give back what :meth:`pin` has made. No work on it may be left."""

    def free_host_bytes(self) -> int:
        """Bytes of host memory that could be pinned."""
        return available_bytes()

    def synchronize(self) -> None:
        """Let the host wait for both copy streams."""


class Direct:
    """A kernel that a CUDA device runs past PyTorch."""

    __slots__ = ()

    def __call__(self, *tensors: torch.Tensor) -> None:
        """By PyTorch's operators."""
        raise NotImplementedError

    def enqueue(self, backend: CudaBackend, stream: int, tensors: tuple[torch.Tensor, ...]) -> None:
        """The same on a stream."""
        raise NotImplementedError


class CudaBackend(Backend):
    """A CUDA device with two copy streams of its own beside whatever stream the computation is on. Streams are the
    driver's handles: :meth:`torch_stream` makes PyTorch's of them."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self._index = torch.device("cuda", index), index
        self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self.d2h, self.h2d = (stream.cuda_stream for stream in self._streams)
        self.driver = Driver(index)
        events = Events(self.driver)
        self.record, self.follow = events.recorded, events.followed  # type: ignore[method-assign]
        self.compute = partial(current_stream, index)  # type: ignore[method-assign]
        self._work = torch.empty(0, dtype=torch.uint8)

    def torch_stream(self, stream: int) -> torch.cuda.Stream:
        """PyTorch's form of a stream, for ``torch.cuda.stream``."""
        return torch_stream(stream, self._index)

    def empty(self, nbytes: int, stream: int) -> torch.Tensor:
        if stream == current_stream(self._index):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with torch.cuda.stream(self.torch_stream(stream)):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def work(self, nbytes: int) -> torch.Tensor:
        """Memory for what runs on ``d2h``, one kernel after the other."""
        if self._work.numel() < nbytes:
            self._work = self.empty(nbytes, self.d2h)
        return self._work

    def run(self, stream: int, kernel: Kernel, *tensors: torch.Tensor) -> None:
        if isinstance(kernel, Direct):
            kernel.enqueue(self, stream, tensors)
            return
        with torch.cuda.stream(self.torch_stream(stream)), torch.no_grad():
            kernel(*tensors)

    def copy(self, to: int, start: int, nbytes: int, stream: int) -> None:
        """Bytes from one address to another, either of which may be pinned host memory."""
        driver = self.driver
        code = driver.copy(to, start, nbytes, stream)
        if code:
            driver.again(code, driver.copy, to, start, nbytes, stream)

    def wait(self, stream: int, event: DriverEvent) -> None:
        driver = self.driver
        code = driver.wait(stream, event.handle, 0)
        if code:
            driver.again(code, driver.wait, stream, event.handle, 0)

    def done(self, event: DriverEvent) -> bool:
        driver = self.driver
        code = driver.query(event.handle)
        if code and code != NOT_READY:
            code = driver.again(code, driver.query, event.handle)
        return not code

    def pin(self, nbytes: int) -> torch.Tensor:
        with _disable_current_modes():
            return pin(nbytes, self.device)

    def unpin(self, memory: torch.Tensor) -> None:
        unpin(memory)

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def backend_for(device: torch.device) -> Backend:
    """The backend of a tensor's device. Raises ValueError for one that is neither a CPU nor CUDA."""
    if device.type == "cuda":
        return CudaBackend(device)
    if device.type == "cpu":
        return Backend()
    raise ValueError(f"offload: device must be cpu or cuda, got {device}; keep the tensors of {device} on it")
