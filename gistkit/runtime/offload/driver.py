"""Copies, events and waits of streams by the CUDA driver itself, called through ctypes.

PyTorch's own (``copy_`` under ``torch.cuda.stream``, ``torch.cuda.Event``) check, dispatch and allocate for 10 to 30 us
a call; the driver takes 1 to 2. Streams and events are numbers here, the driver's handles: a stream of PyTorch's is its
``cuda_stream``. Functions are bound once, with their arguments' types, and let go of Python's lock while they run.
"""

from __future__ import annotations

import ctypes
from typing import Any

from gistkit.errors import OffloadError

LIBRARY = "libcuda.so.1"
NOT_READY, INVALID_CONTEXT = 600, 201
DISABLE_TIMING = 2
_HANDLE, _ADDRESS, _OUT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _HANDLE),
    "cuEventCreate": (_OUT, ctypes.c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, ctypes.c_uint),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuGetErrorName": (ctypes.c_int, _OUT),
}


class Driver:
    """The functions for one device, by number, whose context exists. A code other than 0 goes to :meth:`again`."""

    def __init__(self, index: int, library: Any = None) -> None:
        library = ctypes.CDLL(LIBRARY) if library is None else library
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
        self._library = library
        self.copy = library.cuMemcpyAsync
        """(to, from, bytes, stream) -> code. Either side may be pinned host memory."""
        self.record = library.cuEventRecord
        """(event, stream) -> code."""
        self.wait = library.cuStreamWaitEvent
        """(stream, event, 0) -> code. What is recorded of the event later makes no difference to this wait."""
        self.query = library.cuEventQuery
        """(event) -> code, of which ``NOT_READY`` is no error."""
        device = self._made(library.cuDeviceGet, index, number=ctypes.c_int)
        self._context = self._made(library.cuDevicePrimaryCtxRetain, device)

    def again(self, code: int, function: Any, *arguments: int) -> int:
        """After that code of the function. A thread that has not called CUDA yet has no context: it gets the device's,
        as CUDA's runtime does it, and the function is called once more. Returns 0 or ``NOT_READY``, raises
        OffloadError for every other code."""
        if code == INVALID_CONTEXT:
            self._check(self._library.cuCtxSetCurrent, self._library.cuCtxSetCurrent(self._context))
            code = function(*arguments)
        if code != NOT_READY:
            self._check(function, code)
        return code

    def event(self) -> int:
        return self._made(self._library.cuEventCreate, DISABLE_TIMING)

    def destroy(self, event: int) -> None:
        """Of an event that nobody uses; no error where CUDA has ended already."""
        self._library.cuEventDestroy_v2(event)

    def _made(self, function: Any, argument: int, number: Any = ctypes.c_void_p) -> int:
        made = number()
        code = function(ctypes.addressof(made), argument)
        if code:
            self.again(code, function, ctypes.addressof(made), argument)
        return made.value or 0

    def _check(self, function: Any, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.addressof(name))
            said = (name.value or b"no known name").decode()
            raise OffloadError(f"offload: {function.__name__} must return CUDA_SUCCESS, got {code} ({said})")


class Event:
    """What a stream has reached when it happens. Its handle is another event's as soon as nobody holds it: waits that
    are enqueued already keep what they wait for."""

    __slots__ = ("_free", "handle")

    def __init__(self, handle: int, free: list[int]) -> None:
        self.handle, self._free = handle, free

    def __del__(self) -> None:
        self._free.append(self.handle)


class Events:
    """Events of a driver, used over and over."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: list[int] = []

    def recorded(self, stream: int) -> Event:
        try:
            event = Event(self._free.pop(), self._free)
        except IndexError:
            event = Event(self._driver.event(), self._free)
        code = self._driver.record(event.handle, stream)
        if code:
            self._driver.again(code, self._driver.record, event.handle, stream)
        return event

    def followed(self, stream: int, other: int) -> None:
        """The stream waits for all that the other one holds now, by an event that is free again at once."""
        driver, free = self._driver, self._free
        try:
            handle = free.pop()
        except IndexError:
            handle = driver.event()
        code = driver.record(handle, other)
        if code:
            driver.again(code, driver.record, handle, other)
        code = driver.wait(stream, handle, 0)
        if code:
            driver.again(code, driver.wait, stream, handle, 0)
        free.append(handle)

    def __del__(self) -> None:
        for handle in self._free:
            self._driver.destroy(handle)
