"""The offloader's face: what comes back, in which state, at which bytes, and what it refuses."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given

from gistkit.codecs import codec
from gistkit.errors import HostMemoryError, OffloadError
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.offload import backends, host_memory
from gistkit.runtime.offload.backends import Backend, backend_for
from gistkit.runtime.offload.offloader import Offloader
from gistkit.runtime.offload.parcel import Record, State
from tests.support.streams import Streams
from tests.support.tensors import same_bits, tensors

MIB = 2**20


class Slow(Streams):
    """Streams on which nothing runs before the end."""

    def __init__(self, **memory) -> None:
        super().__init__(0, **memory)
        self._pace = 0.0


def put(offloader, device, n, value=1):
    return offloader.put(device.write(np.full(n, value, np.uint8)))


@pytest.fixture
def device():
    return Slow()


@pytest.fixture
def offloader(device):
    return Offloader(device, MIB, run_ahead_bytes=0, arrival_bytes=1000)


@given(tensors())
def test_every_tensor_comes_back_as_it_was(x):
    got = Offloader(Backend(), MIB, 0, MIB).put(x.requires_grad_()).get()
    assert same_bits(got, x.detach()) and not got.requires_grad
    if torch.ops.aten.is_non_overlapping_and_dense(x):
        assert got.stride() == x.stride()


@pytest.mark.parametrize("name", ["dense", "mask1", "zvc", "csr", "fp8", "fp10s", "zvc+fp8", "csr+fp16s"])
def test_an_encoding_comes_back_as_it_was(name):
    offloader = Offloader(Backend(), MIB, 0, MIB)
    x = torch.relu(torch.randn(3, 5, 40))
    encoded = codec(name).encode(x)
    expected = codec(name).decode(encoded)
    parcel = offloader.put(encoded)
    del encoded
    assert same_bits(codec(name).decode(parcel.get()), expected)
    assert parcel.get().payload[0] is parcel.get().payload[0]


def test_states_and_bytes_of_a_parcel(device, offloader):
    parcel = put(offloader, device, 700)
    assert (parcel.state, parcel.device_bytes, parcel.host_bytes) == (State.HOST, 0, 1024)
    assert parcel.prefetch() and parcel.state is State.ARRIVING and offloader.arriving_bytes == 700
    parcel.get()
    assert (parcel.state, parcel.device_bytes, parcel.host_bytes) == (State.HERE, 700, 0)
    record = parcel._record
    del parcel
    offloader.trim(0)
    assert record.state is State.ENDED
    with pytest.raises(OffloadError, match="from ENDED to HERE, allowed is nothing; this is a defect"):
        record.move(State.HERE)


def test_a_source_that_has_not_gone_is_handed_out(device):
    offloader = Offloader(device, MIB, run_ahead_bytes=1000, arrival_bytes=0)
    x = device.write(np.ones(300, np.uint8))
    address = x.data_ptr()
    parcel = offloader.put(x)
    del x
    assert parcel.state is State.OUTGOING and parcel.get().data_ptr() == address
    assert parcel.state is State.HERE and offloader.arena.used_bytes == 0
    device.finish()
    assert not device.violations


def test_run_ahead_is_bounded_in_bytes(device):
    offloader = Offloader(device, MIB, run_ahead_bytes=1000, arrival_bytes=0)
    parcels = []
    for _ in range(8):
        parcels.append(put(offloader, device, 400))
        assert offloader.outgoing_bytes <= 1000
    assert device.held_bytes(False) <= 1000
    offloader.trim(0)
    assert device.held_bytes(False) == 0 and all(p.state is State.HOST for p in parcels)


def test_prefetches_wait_for_room_in_their_order(device, offloader):
    parcels = [put(offloader, device, 600) for _ in range(3)]
    assert [p.prefetch() for p in parcels] == [True, False, False]
    assert [p.prefetch() for p in parcels] == [True, False, False]
    parcels[0].get()
    assert [p.state for p in parcels] == [State.HERE, State.ARRIVING, State.HOST]
    parcels[2].get()  # late: fetched past the bound
    assert offloader.arriving_bytes == 600


def test_a_prefetch_without_device_memory_is_put_off():
    device = Slow(device_bytes=1000)
    offloader = Offloader(device, MIB, 0, 10_000)
    parcel = put(offloader, device, 700)
    other = device.write(np.zeros(700, np.uint8))
    assert not parcel.prefetch() and parcel.state is State.HOST
    with pytest.raises(torch.OutOfMemoryError):
        parcel.get()
    del other
    assert parcel.get().numel() == 700


def test_a_source_that_was_written_to_raises_as_pytorch_does(device):
    for run_ahead_bytes in (0, 1000):
        offloader = Offloader(device, MIB, run_ahead_bytes, 0)
        x = device.write(np.ones(300, np.uint8))
        offloader._run_ahead_bytes = 1000
        parcel = offloader.put(x)
        x.add_(1)
        offloader.trim(run_ahead_bytes)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            parcel.get()


def test_too_little_host_memory_names_the_bytes():
    with pytest.raises(HostMemoryError, match=r"10240 bytes .* must be pinned; 9216 bytes .*Free host memory") as error:
        Offloader(Slow(host_bytes=10240), 10_000, 0, 0)
    assert error.value.wanted_bytes == 10240
    device = Slow(host_bytes=3000)
    offloader = Offloader(device, 1000, 0, 0)
    parcels = [put(offloader, device, 900), put(offloader, device, 900)]
    assert len(offloader.arena.chunks) == 2
    with pytest.raises(HostMemoryError, match="2048 bytes are pinned for this already"):
        put(offloader, device, 1000)
    assert offloader.outgoing_bytes == 0 and all(p.state is State.HOST for p in parcels)


def test_after_a_close_only_what_is_on_the_device_can_be_had(device, offloader):
    here, there = put(offloader, device, 100), put(offloader, device, 100)
    here.get()
    offloader.close()
    offloader.close()
    assert device.held_bytes(True) == 0 and here.get().numel() == 100
    for call in (there.get, there.prefetch, lambda: offloader.put(torch.ones(1))):
        with pytest.raises(OffloadError, match="it is closed; make a new one"):
            call()


def test_what_is_stored_is_not_read_from_a_lane_after_a_close(device):
    encoded = codec("zvc").begin(torch.ones(3000))
    offloader = Offloader(device, MIB, run_ahead_bytes=0, arrival_bytes=0, lane_bytes=100_000)
    known, unknown = (offloader.put(device.holding(encoded)) for _ in range(2))
    while known.stored() is None:
        device._step()
    offloader.close()
    assert known.stored() == 3000 and unknown.stored() is None


def test_an_offloader_that_is_dropped_unpins_its_memory(device):
    offloader = Offloader(device, MIB, 1000, 0)
    parcel = put(offloader, device, 100)
    del offloader
    gc.collect()
    assert device.held_bytes(True) == MIB  # the parcel may want its bytes
    del parcel
    gc.collect()
    assert device.held_bytes(True) == 0 and device.synchronized == 1


def test_the_host_is_no_memory_of_the_device():
    with LiveBytes() as live:
        offloader = Offloader(Backend(), MIB, 0, MIB)
        parcel = offloader.put(torch.ones(1000))
        offloader.trim(0)
        assert live.current_bytes == 0
        got = parcel.get()
        assert live.current_bytes == 4000
        del parcel, got
        assert live.current_bytes == 0


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        backend_for(torch.device("meta"))
    assert type(backend_for(torch.device("cpu"))) is backends.Backend


def test_cores_of_a_device():
    assert host_memory.cores_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11} and host_memory.cores_of("\n") == set()


def test_parts_begin_at_multiples_of_16():
    record = Record("c0", (torch.ones(3), torch.ones(200, dtype=torch.float64), torch.ones(0)))
    assert [part.start for part in record.parts] == [0, 16, 1616] and record.nbytes == 1616


def test_a_lane_is_no_memory_of_the_device():
    x = torch.relu(torch.randn(5000))
    offloader = Offloader(Backend(), 0, 0, MIB, MIB)
    with LiveBytes() as live:
        parcel = offloader.put(codec("zvc").begin(x))
        assert parcel.state is State.HOST and live.current_bytes < x.nbytes
        parcel.get()
        assert live.peak_bytes < 3 * x.nbytes  # a scratch and an arrival, each somewhat larger than x


def test_what_is_known_to_be_small_is_fetched_in_its_own_size(device):
    offloader = Offloader(device, MIB, run_ahead_bytes=0, arrival_bytes=MIB, lane_bytes=100_000)
    x = torch.zeros(5000)
    x[:70] = 1.0
    parcel = offloader.put(device.holding(codec("zvc").begin(x)))
    device.finish()
    assert parcel.host_bytes > x.nbytes and parcel.stored() == 70
    assert parcel.host_bytes == 2 * 512 + 512  # words and counts, and 280 bytes of values
    got = parcel.get()
    assert parcel.host_bytes == 0
    assert got.payload[2].numel() == got.nonzeros == 70 and parcel.device_bytes < 2000
    device.finish()
    assert torch.equal(codec("zvc").decode(got), x) and not device.violations


@pytest.mark.parametrize("name, slots", [("zvc", 611), ("zvc", 3744), ("csr", 11626)])
def test_a_lane_for_one_encoding_has_room_for_its_cells(name, slots):
    """Of 2.2 to 16 MiB in the worst case: there a lane has a cell to every page."""
    x = torch.ones(slots * codec(name).slot)
    offloader = Offloader(Backend(), arena_bytes=0, run_ahead_bytes=0, arrival_bytes=0)
    got = offloader.put(codec(name).begin(x)).get()
    assert torch.equal(codec(name).decode(got), x)


def test_what_has_just_been_sent_takes_no_more_of_a_lane_than_it_stores(device):
    x = torch.zeros(100_000)
    encoded = codec("zvc").begin(x)
    offloader = Offloader(device, MIB, run_ahead_bytes=0, arrival_bytes=0, lane_bytes=600_000)
    parcels = []
    for _ in range(8):  # of 13 KB each, and 415 KB in the worst case
        parcels.append(offloader.put(device.holding(encoded)))
        device.finish()
    assert offloader.lanes.nbytes == 600_064 and len({p._record.shipment._memory for p in parcels}) == 1


def test_what_was_fetched_before_its_size_was_known_does_not_take_another_ones(device):
    """The second one lies where the first one has lain, and says so in the same place."""
    offloader = Offloader(device, MIB, run_ahead_bytes=0, arrival_bytes=0, lane_bytes=100_000)
    parcels = []
    for x in (torch.ones(3000), torch.ones(70)):
        parcels.append(offloader.put(device.holding(codec("zvc").begin(x))))
        if len(parcels) == 1:
            parcels[0].get()
    device.finish()
    assert len({p._record.shipment._memory for p in parcels}) == 1
    assert [p.stored() for p in parcels] == [None, 70]
