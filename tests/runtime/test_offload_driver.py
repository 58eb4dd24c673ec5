"""What the offloader asks of the CUDA driver, and what a parcel costs the host in Python calls."""

import ctypes
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gistkit.codecs import codec
from gistkit.errors import OffloadError
from gistkit.kernels import STRIDES, compat, ops
from gistkit.kernels.launch import direct
from gistkit.kernels.launch.tiling import Ready
from gistkit.kernels.sparse.lane import Ships
from gistkit.runtime.offload import backends
from gistkit.runtime.offload.driver import Driver
from gistkit.runtime.offload.offloader import Offloader
from tests.support.tensors import same_bits

MIB, NO_BOUND = 2**20, 2**62

COMPUTE, D2H, H2D = 7, 11, 12
"""Handles of streams."""
NAMES = {201: b"CUDA_ERROR_INVALID_CONTEXT", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}


class Library:
    """A libcuda without CUDA, on the host's memory, each of whose functions runs at once. ``calls``: (function,
    arguments) in order, of those that enqueue; ``codes``: what a function returns the next time; ``pending``: what an
    event's query returns."""

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

    def _done(self, *_: int) -> int:
        return 0

    cuEventDestroy_v2 = cuEventRecord = cuStreamWaitEvent = cuCtxSetCurrent = _done

    def cuEventQuery(self, event: int) -> int:
        return self.pending

    def cuDeviceGet(self, out: int, index: int) -> int:
        ctypes.c_int.from_address(out).value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, out: int, device: int) -> int:
        ctypes.c_void_p.from_address(out).value = 500 + device
        return 0

    def cuGetErrorName(self, code: int, out: int) -> int:
        ctypes.c_char_p.from_address(out).value = NAMES[code]
        return 0


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def backend(library, monkeypatch):
    """A backend of CUDA over that library, whose device's memory is the CPU's."""
    streams = iter((D2H, H2D))
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
    return backend


def test_bytes_go_there_and_back(backend, library):
    offloader = Offloader(backend, MIB, 0, MIB)
    tensors = torch.randn(3, 4, 5), torch.randn(3, 4, 5).permute(2, 0, 1), torch.randn(7, dtype=torch.complex64).conj()
    for x in (*tensors, torch.randn(6, 6)[::2], torch.empty(0, 3), torch.tensor(True)):
        parcel = offloader.put(x)
        parcel.release()
        assert same_bits(parcel.get(), x.resolve_conj())
    for name in ("csr", "zvc+fp8s", "fp10s", "mask1"):
        x = torch.relu(torch.randn(5, 999))
        encoded = codec(name).encode(x)
        expected = codec(name).decode(encoded)
        parcel = offloader.put(encoded)
        parcel.release()
        assert same_bits(codec(name).decode(parcel.get()), expected)


class Oracle:
    """The launches of a lane."""

    work_bytes = 64

    def __init__(self, slots, stride, bits, columns, device):
        self.stride = stride

    def __call__(self, stream, work, values, index, counts, lane, begin, after, place):
        assert stream == D2H and work.numel() >= 64
        ops.ship(values, index, counts, self.stride, lane, begin, after, place)


@pytest.mark.parametrize("name", ["zvc", "csr", "zvc+fp8", "csr+fp16"])
@pytest.mark.parametrize("known", [True, False])
def test_a_lane_goes_there_and_back(backend, library, monkeypatch, name, known):
    monkeypatch.setattr(direct, "ships", Oracle)
    offloader = Offloader(backend, MIB, 0, MIB, MIB // 2)
    inputs = [torch.relu(torch.randn(3000 + i) - i / 4) for i in range(6)]
    library.pending = 0 if known else 600
    parcels = [offloader.put(codec(name).begin(x)) for x in inputs]
    while parcels:
        encoded, x = parcels.pop().get(), inputs.pop()
        assert not known or encoded.payload[2].numel() == encoded.nonzeros == (x > 0).sum()
        assert same_bits(codec(name).decode(encoded), codec(name).decode(codec(name).encode(x)))


@pytest.mark.parametrize("layout, slots", [("zvc", 3), ("csr", 12), ("zvc", 1025), ("csr", 1025)])
def test_ready_launches_get_the_addresses_of_the_first_ones_tensors(monkeypatch, layout, slots):
    """Of few slots one launch, of more of them two."""
    seen, given, ready = [], [], {}

    def at(self, n, addresses, *rest):
        seen.append(list(addresses))
        return ready.get(id(self), False)

    def first(self, n, tensors, *rest):
        given.append([t.data_ptr() for t in tensors])
        ready[id(self)] = True

    monkeypatch.setattr(Ready, "at", at)
    monkeypatch.setattr(Ready, "first", first)
    payload = codec(layout).begin(torch.randn(slots * STRIDES[layout] - 5)).payload
    cells = torch.zeros(3, 2, dtype=torch.int64)
    index, counts, values = payload[:3]
    ships = Ships(len(counts), STRIDES[layout], torch.int32, layout == "csr", 0)
    lane, work = (torch.zeros(n, dtype=torch.uint8) for n in (16384, ships.work_bytes))
    launches = 1 if slots <= 1024 else 2
    for _ in range(2):
        ships(5, work, values, index, counts, lane, cells[0], cells[1], cells[2])
        assert len(given) == launches
    assert seen[-launches:] == given and len(given[-1]) == 13


def test_what_a_sparse_parcel_asks_of_the_driver(backend, library, monkeypatch):
    """One launch, one copy back, four events, and some 120 Python calls: 190 with two copies and a span of its own."""

    class Empty(Oracle):
        def __call__(self, *tensors):
            tensors[-1].zero_()

    monkeypatch.setattr(direct, "ships", Empty)
    offloader = Offloader(backend, MIB, NO_BOUND, MIB, MIB // 2)
    calls = []
    for _ in range(3):  # the first ones make events and cells
        encoded = codec("zvc").begin(torch.relu(torch.randn(3000)))
        calls.clear()
        library.calls.clear()
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            parcel = offloader.put(encoded)
            parcel.release()
            parcel.prefetch()
            parcel.get()
        finally:
            sys.setprofile(None)
    names = [name for name, _ in library.calls]
    assert {name: names.count(name) for name in sorted(set(names))} == {
        "cuEventQuery": 2, "cuEventRecord": 4, "cuMemcpyAsync": 1, "cuStreamWaitEvent": 4,
    }  # fmt: skip
    made = sum(event in ("call", "c_call") for event in calls) - 5 * len(names)  # the library's, which is Python here
    assert made <= 130, made


def test_what_is_enqueued_where(backend, library):
    offloader = Offloader(backend, MIB, NO_BOUND, MIB)
    library.pending = 600
    parcel = offloader.put(torch.ones(10))
    library.calls.clear()
    parcel.release()
    parcel.get()
    here, there = COMPUTE, H2D
    on = [(name, arguments[{"cuMemcpyAsync": 3, "cuEventRecord": 1}.get(name, 0)]) for name, arguments in library.calls]
    on = [(name, stream) for name, stream in on if name in ("cuMemcpyAsync", "cuEventRecord", "cuStreamWaitEvent")]
    assert on == [
        ("cuStreamWaitEvent", here),  # for the copy, before the source goes
        ("cuEventRecord", here),
        ("cuStreamWaitEvent", there),
        ("cuMemcpyAsync", there),
        ("cuEventRecord", there),
        ("cuStreamWaitEvent", here),
    ]


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"])
def test_an_error_is_raised_with_its_name(backend, library, name):
    offloader = Offloader(backend, MIB, NO_BOUND, MIB)
    library.codes[name] = 700
    with pytest.raises(OffloadError, match=rf"{name} must return CUDA_SUCCESS, got 700 \(CUDA_ERROR_ILLEGAL_ADDRESS\)"):
        offloader.put(torch.ones(10))


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"])
def test_a_thread_without_a_context_gets_the_devices(backend, library, name):
    offloader = Offloader(backend, MIB, 0, MIB)
    library.codes[name] = 201
    assert offloader.put(torch.ones(10)).get().sum() == 10
    assert [arguments for called, arguments in library.calls if called == "cuCtxSetCurrent"] == [(500,)]


def test_events_are_used_again(backend, library):
    offloader = Offloader(backend, MIB, NO_BOUND, MIB)
    for _ in range(30):
        parcels = [offloader.put(torch.ones(10)) for _ in range(3)]
        for parcel in parcels:
            parcel.prefetch()
            parcel.get()
    assert library.made <= 8
