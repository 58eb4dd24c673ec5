"""Sparse encodings within a forecast: nobody waits, one scratch at a time, and no bit is lost where it was too low."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, Encoded, Sparse
from gistkit.errors import GistError
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.sparse_sizes.exact import BY_COUNT, MARGIN, ExactPacker, Forecast
from gistkit.runtime.sparse_sizes.spill import NO_MEMORY, Spill
from tests.runtime.sparse_sizes.test_exact import LateCounts, waiting
from tests.runtime.sparse_sizes.test_spill import lent_bytes
from tests.support.tensors import float_values, plain_nan, same_bits, tensors

SPARSE = {name: c for name, c in CODECS.items() if isinstance(c, Sparse)}
WITHIN = [name for name, c in SPARSE.items() if c.packs_within]
N = 40_000


class Host:
    """A packer whose counts arrive when told to, host memory that is the CPU's, and what it was told."""

    def __init__(self, limit_bytes: int = 2**28, **options) -> None:
        self.counts = LateCounts()
        self.spill = Spill(lambda n, _: torch.empty(n, dtype=torch.uint8), lambda *_: limit_bytes)
        self.packer = ExactPacker(transport=lambda: self.counts, spill=self.spill, **options)
        self.told: list[float] = []

    def encode(self, name: str, x: torch.Tensor, share: float | None) -> Encoded:
        return self.packer.encode(CODECS[name], x, forecast=Forecast(share, self.told.append))


def values(seed: int = 0, zeros: float = 0.5, n: int = N) -> torch.Tensor:
    return float_values(n, torch.float32, seed, zeros, False).abs()


@pytest.mark.parametrize("name", WITHIN)
@settings(max_examples=6)
@given(x=tensors(), share=st.floats(0, 1))
def test_every_bit_comes_back_before_and_after_the_count_whatever_was_forecast(name, x, share):
    host, codec = Host(), SPARSE[name]
    x = plain_nan(x)
    encoded, want = host.encode(name, x, share), codec.decode(codec.encode(x))
    assert same_bits(codec.decode(encoded), want)
    host.counts.arrive()
    assert host.packer.poll() == len(host.counts.tickets) and not encoded.pending
    assert same_bits(codec.decode(encoded), want) and host.counts.waited == 0
    if x.numel():
        stored = codec.encode(x).nonzeros
        assert stored == encoded.nonzeros and host.told == [stored / x.numel()]
        assert host.packer.beyond == (encoded.state()[2] is not None)


@pytest.mark.parametrize("bounded", [False, True])
def test_one_scratch_lives_at_a_time_however_far_ahead_the_host_is(bounded):
    host, codec = Host(bounded=bounded), SPARSE["zvc"]
    xs = [values(seed) for seed in range(9)]
    host.encode("zvc", xs[0][:100], 0.5)  # the device has been asked whether it reaches the host's memory
    capacity = codec.capacity(N, 0.5 + MARGIN)
    kept_bytes, held = codec.within_bytes(N, torch.float32, capacity), []
    with LiveBytes() as live:
        for i, x in enumerate(xs):
            live.reset_peak()
            held.append(host.encode("zvc", x, 0.5))
            assert live.current_bytes == kept_bytes * (i + 1)
            once_bytes = codec.scratch_bytes(N, torch.float32) + 4 * capacity
            assert live.peak_bytes <= kept_bytes * i + once_bytes + 8  # the count
        assert host.counts.waited == 0 and sum(e.nbytes for e in held) == live.current_bytes
        del held
        assert live.current_bytes == 0


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in WITHIN])
def test_a_format_whose_packing_depends_on_the_count_is_waited_for_and_says_so(name):
    host = Host(bounded=True, lag=1)
    held = [host.encode(name, values(seed), 0.5) for seed in range(3)]
    assert [e.pending for e in held] == [False, False, True] and host.packer.waits == {BY_COUNT.format(name): 2}
    assert host.told == [int((values(seed) != 0).sum()) / N for seed in range(2)]


def test_without_host_memory_it_is_waited_for_and_says_so():
    host = Host(limit_bytes=2**24, bounded=True, lag=1)
    full = [host.spill.take(2**24, values())]
    held = [host.encode("zvc", values(seed), 0.5) for seed in range(2)]
    assert host.packer.waits == {NO_MEMORY: 1}
    full.clear()
    held.clear()
    encoded = host.encode("zvc", values(), 0.5)
    assert encoded.nbytes < SPARSE["zvc"].scratch_bytes(N, torch.float32)
    none, x = Host(limit_bytes=0, bounded=True, lag=1), values()
    held = [none.encode("zvc", x, 0.5) for _ in range(2)]
    assert none.packer.waits == {NO_MEMORY: 1} and not held[0].pending


def test_a_count_that_cannot_be_is_refused_and_nothing_is_lost():
    host, x = Host(), values()
    encoded = host.encode("zvc", x, 0.1)
    ticket = host.counts.tickets[0]
    total = ticket.total
    ticket.slot.fill_(N + 1)
    host.counts.arrive()
    with pytest.raises(GistError, match=f"codec zvc: got {N + 1} stored elements of {N}"):
        host.packer.poll()
    with pytest.raises(GistError, match="defect of the transport"):
        host.encode("zvc", x, 0.1)
    assert encoded.pending and host.told == [] and same_bits(SPARSE["zvc"].decode(encoded), x)
    ticket.slot.fill_(total)
    assert host.packer.poll() == 1 and encoded.state()[2] is not None


@settings(max_examples=10)
@given(data=st.data())
def test_encodings_that_come_go_and_are_counted_in_any_order_keep_their_bits(data):
    host, held, sent = Host(bounded=True, lag=3), {}, 0
    for _ in range(data.draw(st.integers(5, 25))):
        what = data.draw(st.sampled_from(["encode", "encode", "encode", "arrive", "poll", "drop", "read"]))
        if what == "encode":
            name, zeros = data.draw(st.sampled_from(WITHIN)), data.draw(st.sampled_from([0.1, 0.6, 0.95]))
            share = data.draw(st.sampled_from([None, 0.02, 0.3, 0.8]))
            x = values(sent, zeros, data.draw(st.sampled_from([900, 9000, 20_000])))
            held[sent] = name, SPARSE[name].decode(SPARSE[name].encode(x)), host.encode(name, x, share)
            sent += 1
        elif what == "arrive" and sent:
            host.counts.tickets[data.draw(st.integers(0, sent - 1))].arrive()
        elif what == "poll":
            host.packer.poll()
        elif held:
            number = data.draw(st.sampled_from(sorted(held)))
            name, want, encoded = held.pop(number) if what == "drop" else held[number]
            assert same_bits(SPARSE[name].decode(encoded), want)
            del encoded
    spilled = [encoded.state()[2] for _, _, encoded in held.values()]
    assert lent_bytes(host.spill) == sum(memory.numel() for memory in spilled if memory is not None)
    assert all(same_bits(SPARSE[name].decode(encoded), want) for name, want, encoded in held.values())
    host.counts.arrive()
    host.packer.poll()
    assert all(same_bits(SPARSE[name].decode(encoded), want) for name, want, encoded in held.values())
    assert not any(encoded.pending for _, _, encoded in held.values()) and len(host.told) == sent
    spilled.clear()
    held.clear()
    assert lent_bytes(host.spill) == 0


def test_backwards_in_other_threads_see_one_state_or_the_other():
    host, wrong, done = Host(), [], threading.Event()
    held: list[tuple[str, Encoded, torch.Tensor]] = []

    def backward() -> None:
        while not done.is_set():
            for name, encoded, want in list(held):
                host.packer.poll()
                if not same_bits(SPARSE[name].decode(encoded), want):
                    wrong.append(name)

    readers = [threading.Thread(target=backward) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(30):
        name, x = WITHIN[i % len(WITHIN)], values(i, n=20_000)
        encoded = host.encode(name, x, 0.1 if i % 3 else 0.6)
        held.append((name, encoded, SPARSE[name].decode(SPARSE[name].encode(x))))
        del encoded
        host.counts.tickets[-1].arrive()
        if len(held) > 5:
            held.pop(0)
    done.set()
    for reader in readers:
        reader.join()
    held.clear()
    host.packer.poll()
    assert not wrong and lent_bytes(host.spill) == 0 and waiting(host.packer) == 0 and len(host.told) == 30
