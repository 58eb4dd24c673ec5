"""A CUDA backend without CUDA: the driver's functions in Python, on the host's memory, each of which runs at once."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace

import torch

from gistkit.kernels import compat
from gistkit.runtime.offload import backends
from gistkit.runtime.offload.driver import Driver

COMPUTE, D2H, H2D = 7, 11, 12
"""Handles of streams."""
NAMES = {201: b"CUDA_ERROR_INVALID_CONTEXT", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}


class Library:
    """libcuda. ``calls``: (function, arguments) in order, of those that enqueue; ``codes``: what a function returns
    the next time; ``pending``: what an event's query returns."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.codes: dict[str, int] = {}
        self.made, self.pending = 0, 0
        for name in dir(Library):
            if name.startswith("cu"):
                setattr(self, name, self._counted(name))

    def _counted(self, name: str):
        function = getattr(Library, name)

        def call(*arguments: int) -> int:
            self.calls.append((name, arguments))
            return self.codes.pop(name, 0) or function(self, *arguments)

        call.__name__ = name
        return call

    def cuMemcpyAsync(self, to: int, start: int, nbytes: int, stream: int) -> int:
        ctypes.memmove(to, start, nbytes)
        return 0

    def cuEventCreate(self, out: int, flags: int) -> int:
        self.made += 1
        ctypes.c_void_p.from_address(out).value = 1000 + self.made
        return 0

    def cuEventDestroy_v2(self, event: int) -> int:
        return 0

    def cuEventRecord(self, event: int, stream: int) -> int:
        return 0

    def cuEventQuery(self, event: int) -> int:
        return self.pending

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:
        return 0

    def cuDeviceGet(self, out: int, index: int) -> int:
        ctypes.c_int.from_address(out).value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, out: int, device: int) -> int:
        ctypes.c_void_p.from_address(out).value = 500 + device
        return 0

    def cuCtxSetCurrent(self, context: int) -> int:
        return 0

    def cuGetErrorName(self, code: int, out: int) -> int:
        ctypes.c_char_p.from_address(out).value = NAMES[code]
        return 0


def cuda_backend(monkeypatch) -> tuple[backends.CudaBackend, Library]:
    """A backend of CUDA over such a library, whose device's memory is the CPU's, and the library."""
    library, streams = Library(), iter((D2H, H2D))
    monkeypatch.setattr(backends, "Driver", partial(Driver, library=library))
    monkeypatch.setattr(backends, "current_stream", lambda index: COMPUTE)
    monkeypatch.setattr(compat, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=next(streams), synchronize=lambda: None)
    )
    backend = backends.CudaBackend(torch.device("cuda", 0))
    backend.device = torch.device("cpu")
    backend.pin = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    backend.unpin = lambda memory: None
    backend.torch_stream = lambda stream: None  # torch.cuda.stream(None) does nothing
    return backend, library
