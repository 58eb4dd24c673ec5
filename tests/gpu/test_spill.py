"""Sparse storage in arrays of a forecast capacity with a spill in pinned memory, against plain encodings of the same.

The launches that PyTorch's allocator cannot see write to host memory: what is read there is read after the stream is
done, and a spill outlives the work on it.
"""

import pytest
import torch

from gistkit import formats
from gistkit.codecs import Encoded, Sparse
from gistkit.kernels.sparse.spill import GROUP, group_slots
from tests.codecs.test_spill_codec import UNTOUCHED, WITHIN, check_reads
from tests.gpu.waiting import no_synchronisation
from tests.support.tensors import FLOATS, bits, float_values, plain_nan, same_bits

N = 50 * GROUP + 1234


def pinned(codec: Sparse, n: int, dtype: torch.dtype, capacity: int) -> torch.Tensor:
    return torch.full((codec.spill_bytes(n, dtype, capacity),), UNTOUCHED, dtype=torch.uint8).pin_memory()


def capacity_of(codec: Sparse, x: torch.Tensor, room: float) -> int:
    """A multiple of 8 items: this share of what is stored of x, no more than there can be."""
    stored = int((bits(x) != 0).sum())
    whole = formats.ceil_div(x.numel(), codec.slot) * codec.slot
    return min(max(formats.ceil_div(int(stored * room), 8) * 8, 8), whole)


def within(codec: Sparse, x: torch.Tensor, room: float) -> tuple[Encoded, torch.Tensor]:
    capacity = capacity_of(codec, x, room)
    spill = pinned(codec, x.numel(), x.dtype, capacity)
    count = count_of(x)
    encoded = codec.begin_within(x, capacity, spill, count)
    if x.is_cuda:
        torch.cuda.synchronize()
    assert int(count) == int((bits(x) != 0).sum())
    return encoded, spill


def count_of(x: torch.Tensor) -> torch.Tensor:
    """Where the number of stored elements goes."""
    return torch.full((2,), -1, dtype=torch.int64).pin_memory()[0] if x.is_cuda else torch.zeros((), dtype=torch.int64)


def values(n: int, dtype: torch.dtype, codec: Sparse, zeros: float, seed: int = 2) -> torch.Tensor:
    """Negative zeros, NaN and infinities among them; narrow formats get one NaN for all."""
    x = float_values(n, dtype, seed, zeros, False)
    return (x if codec.lossless else plain_nan(x)).cuda()


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zeros, room", [(0.3, 0.5), (0.3, 0.9999), (0.95, 0.0), (0.95, 1.0), (0.3, 1.5)])
def test_reading_gives_the_plain_encodings_bits_before_and_after_settling(name, dtype, zeros, room):
    codec = WITHIN[name]
    x = values(N, dtype, codec, zeros)
    grad = float_values(N, dtype, 3, 0.1, False).cuda()
    plain = codec.begin(x)
    total = int(codec.total(plain))
    codec.settle(plain, total)
    encoded, spill = within(codec, x, room)
    capacity = encoded.payload[2].numel()
    assert encoded.pending and int(codec.total(encoded)) == total
    assert encoded.nbytes == codec.within_bytes(N, dtype, capacity)
    check_reads(codec, encoded, plain, grad)
    codec.settle(encoded, total)
    assert not encoded.pending and (encoded.state()[2] is not None) is (total > capacity)
    check_reads(codec, encoded, plain, grad)
    torch.cuda.synchronize()
    assert bool((spill == UNTOUCHED).all()) is (total <= capacity)


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n, room", [(1, 0.0), (1000, 0.6), (GROUP, 0.6), (3 * GROUP + 17, 1.0), (N, 0.0), (N, 0.6)])
def test_arrays_and_spill_are_the_oracles(name, dtype, n, room):
    """To the byte, and no byte besides: what the host codec makes of the same tensor."""
    codec = WITHIN[name]
    x = values(n, dtype, codec, 0.5)
    encoded, spill = within(codec, x, room)
    torch.cuda.synchronize()
    expected, run = within(codec, x.cpu(), room)
    assert torch.equal(spill, run)
    capacity = expected.payload[2].numel()
    counts = expected.payload[1]
    last = counts.cumsum(0, dtype=torch.int64)[group_slots(codec.slot) - 1 :: group_slots(codec.slot)]
    inside = max([int(e) for e in last if e <= capacity], default=0)
    if int(counts.sum()) <= capacity:
        inside = int(counts.sum())
    for a, b in zip(encoded.payload, expected.payload, strict=True):
        assert a.shape == b.shape
        a, b = (a[:inside].cpu(), b[:inside]) if a.numel() == capacity else (a.cpu(), b)
        assert same_bits(a, b)


@pytest.mark.parametrize("name", WITHIN)
def test_a_part_of_a_larger_pinned_chunk(name):
    """A spill that begins in the middle, at a multiple of 512 bytes; nothing beside it is written."""
    codec = WITHIN[name]
    x = values(N, torch.float32, codec, 0.5)
    capacity = capacity_of(codec, x, 0.5)
    size = codec.spill_bytes(N, x.dtype, capacity)
    chunk = torch.full((size + 8192,), UNTOUCHED, dtype=torch.uint8).pin_memory()
    encoded = codec.begin_within(x, capacity, chunk[4096 : 4096 + size], count_of(x))
    assert same_bits(codec.decode(encoded), codec.decode(codec.begin(x)))
    torch.cuda.synchronize()
    assert bool((chunk[:4096] == UNTOUCHED).all()) and bool((chunk[4096 + size :] == UNTOUCHED).all())


@pytest.mark.parametrize("name", WITHIN)
def test_nothing_waits_and_the_scratch_is_let_go_of(name):
    codec = WITHIN[name]
    n = 1 << 22
    x = torch.relu(torch.randn(n, device="cuda"))
    capacity = codec.capacity(n, 0.55)
    spill = pinned(codec, n, x.dtype, capacity)
    count = count_of(x)
    codec.decode(codec.begin_within(x, capacity, spill, count))  # compiles the kernels
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with no_synchronisation():
        torch.cuda._sleep(100_000_000)
        encoded = codec.begin_within(x, capacity, spill, count)
        held = torch.cuda.memory_allocated() - before
        codec.decode(encoded)
    # the allocator leaves up to 1 MiB unsplit after a large block and rounds the others to 512 bytes
    assert encoded.nbytes <= held <= encoded.nbytes + 2 * 2**20 + 3 * 512
    codec.settle(encoded, int(codec.total(encoded)))
    assert encoded.state()[2] is None


@pytest.mark.parametrize("shift", [0, 1])
def test_tensors_and_gradients_at_any_address(shift):
    """Views of larger tensors, as a concatenation's backward hands them on; n is a multiple of 8."""
    codec = WITHIN["zvc"]
    x, grad = (values(N + 6 + shift, torch.float32, codec, 0.3, seed)[shift:][: N + 6] for seed in (2, 3))
    plain = codec.begin(x.clone())
    encoded, _ = within(codec, x, 1.5)
    assert (N + 6) % 8 == 0 and same_bits(codec.decode(encoded), x)
    assert same_bits(codec.relu_backward(encoded, grad), codec.relu_backward(plain, grad.clone()))
