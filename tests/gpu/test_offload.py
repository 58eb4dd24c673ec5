"""The offloader on a CUDA device, with the host far ahead: nobody waits, every bit is there."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gistkit.codecs import CODECS
from gistkit.errors import HostMemoryError
from gistkit.runtime.offload.backends import CudaBackend
from gistkit.runtime.offload.host_memory import pin, unpin
from gistkit.runtime.offload.offloader import Offloader
from tests.gpu.waiting import no_synchronisation
from tests.support.tensors import same_bits

SLEEP_CYCLES = 1_500_000_000  # about 0.8 s at 2 GHz, many times what the host takes
MIB = 2**20


@pytest.fixture
def backend():
    return CudaBackend(torch.device("cuda"))


def late(backend, asleep):
    stream = torch.cuda.current_stream() if asleep == "compute" else backend.torch_stream(getattr(backend, asleep))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)


@pytest.mark.parametrize("asleep", ("compute", "d2h", "h2d"))
@pytest.mark.parametrize("run_ahead_bytes", (0, 8 * MIB, 256 * MIB))
def test_a_stack_of_tensors_whichever_stream_is_late(backend, asleep, run_ahead_bytes):
    offloader = Offloader(backend, 64 * MIB, run_ahead_bytes, 8 * MIB)
    late(backend, asleep)
    with no_synchronisation():
        parcels, expected, found = [], [], []
        for i in range(16):
            x = torch.full((MIB,), float(i), device="cuda")
            expected.append(x.sum())
            parcels.append(offloader.put(x))
            del x
            torch.empty(MIB, device="cuda").fill_(-1.0)  # takes memory that was let go of
        while parcels:
            if len(parcels) > 1:
                parcels[-2].prefetch()
            found.append(parcels.pop().get().sum())
            torch.empty(MIB, device="cuda").fill_(-1.0)
    assert torch.equal(torch.stack(found[::-1]), torch.stack(expected))
    offloader.trim(0)
    assert offloader.arena.used_bytes == offloader.outgoing_bytes == offloader.arriving_bytes == 0
    offloader.close()


@pytest.mark.parametrize("name", ("zvc", "csr", "zvc+fp8", "csr+fp16"))
@pytest.mark.parametrize("asleep", ("compute", "d2h", "h2d", "nobody"))
def test_sparse_encodings_in_a_lane(backend, name, asleep):
    offloader = Offloader(backend, 128 * MIB, 0, 64 * MIB, 96 * MIB)
    codec = CODECS[name]
    inputs = [torch.relu(torch.randn(MIB + i, device="cuda") - i / 4) for i in range(6)]
    expected = [codec.decode(codec.begin(x)) for x in inputs]
    torch.cuda.synchronize()
    if asleep != "nobody":
        late(backend, asleep)
    with no_synchronisation():
        parcels = [offloader.put(codec.begin(x)) for x in inputs]
    if asleep == "nobody":
        torch.cuda.synchronize()
    with no_synchronisation():
        found = []
        while parcels:
            encoded = parcels.pop().get()
            found.append(codec.decode(encoded))
            assert asleep != "nobody" or encoded.payload[2].numel() == encoded.nonzeros
            del encoded
    assert all(same_bits(a, b) for a, b in zip(found[::-1], expected, strict=True))
    offloader.close()


@pytest.mark.parametrize("name, slots", [("zvc", 611), ("zvc", 3744), ("csr", 11626)])
def test_a_lane_for_one_encoding_has_room_for_its_cells(backend, name, slots):
    """All values stored: 2.2 to 16 MiB, where a lane has a cell to every page."""
    x = torch.arange(1, slots * CODECS[name].slot + 1, device="cuda").float()
    offloader = Offloader(backend, arena_bytes=0, run_ahead_bytes=0, arrival_bytes=0)
    parcel = offloader.put(CODECS[name].begin(x))
    assert same_bits(CODECS[name].decode(parcel.get()), x)
    del parcel
    offloader.close()


@pytest.mark.parametrize("name", ("dense", "zvc"))
def test_a_thread_that_has_not_called_cuda_and_a_stream_of_its_own(backend, name):
    offloader = Offloader(backend, 64 * MIB, 0, 8 * MIB, 16 * MIB)
    codec, x = CODECS[name], torch.relu(torch.randn(MIB, device="cuda"))
    begin = codec.encode if name == "dense" else codec.begin
    encoded, others = begin(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        parcel = thread.submit(offloader.put, encoded).result()
        del encoded
        thread.submit(parcel.release).result()
        thread.submit(parcel.prefetch).result()
    with torch.cuda.stream(others):
        found = codec.decode(parcel.get())
    others.synchronize()
    assert same_bits(found, x)
    offloader.close()


def test_memory_is_pinned_and_can_be_given_back():
    memory = pin(5 * MIB + 17, torch.device("cuda", 0))
    assert memory.is_pinned() and memory.numel() == 5 * MIB + 17
    unpin(memory)
    assert not memory.is_pinned()


def test_memory_that_cannot_be_pinned_is_refused_with_its_bytes():
    with pytest.raises(HostMemoryError, match=f"{2**50} bytes"):
        pin(2**50, torch.device("cuda", 0))
    assert torch.ones(3, device="cuda").sum().item() == 3  # no error of CUDA's is left for others
