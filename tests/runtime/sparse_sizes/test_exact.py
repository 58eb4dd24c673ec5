"""Delayed exact packing: the state machine, driven by counts that arrive when the test says so."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, Encoded, Sparse, sparse
from gistkit.errors import GistError
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from tests.support.tensors import float_values, plain_nan, same_bits, tensors

SPARSE = [name for name, c in CODECS.items() if isinstance(c, Sparse)]
law = settings(deadline=None, max_examples=20, derandomize=True)


class LateTicket:
    """A count that arrives when ``arrive`` is called."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total, self.here = int(total), False
        self.asked = self.waited = 0

    def arrive(self) -> None:
        self.here = True

    def ready(self) -> int | None:
        self.asked += 1
        return self.total if self.here else None

    def wait(self) -> int:
        self.waited += 1
        return self.total


class LateCounts:
    """A transport that remembers its tickets."""

    def __init__(self) -> None:
        self.tickets: list[LateTicket] = []

    def send(self, total: torch.Tensor) -> LateTicket:
        assert total.shape == () and total.dtype == torch.int64
        self.tickets.append(LateTicket(total))
        return self.tickets[-1]


def packer(**options) -> tuple[ExactPacker, LateCounts]:
    counts = LateCounts()
    return ExactPacker(transport=lambda: counts, **options), counts


def sparse_tensor(seed: int = 0, n: int = 3000) -> torch.Tensor:
    return torch.relu(float_values(n, torch.float32, seed, 0.3, False))


def same_payload(a: Encoded, b: Encoded) -> bool:
    if len(a.payload) != len(b.payload):
        return False
    return all(same_bits(x, y) for x, y in zip(a.payload, b.payload, strict=True))


@pytest.mark.parametrize("name", SPARSE)
@law
@given(x=tensors())
def test_decoding_gives_the_same_bits_before_and_after_settling(name, x):
    p, counts = packer()
    encoded, at_once = p.encode(name, x), CODECS[name].encode(x)
    assert encoded.pending == (x.numel() > 0) and not at_once.pending
    before = CODECS[name].decode(encoded)
    for ticket in counts.tickets:
        ticket.arrive()
    assert p.poll() == len(counts.tickets)
    assert not encoded.pending and same_payload(encoded, at_once)
    assert encoded.nbytes == at_once.nbytes and encoded.nonzeros == at_once.nonzeros
    assert same_bits(plain_nan(before), plain_nan(CODECS[name].decode(encoded)))
    assert same_bits(plain_nan(before), plain_nan(CODECS[name].decode(at_once)))
    assert before.stride() == CODECS[name].decode(encoded).stride()


@pytest.mark.parametrize("name", [name for name in SPARSE if CODECS[name].scaling != "none"])
def test_what_lies_past_the_values_changes_no_scale(name, monkeypatch):
    compact, csr_compact = sparse.ops.compact, sparse.ops.csr_compact

    def dirty(scratch, counts, stride, total, spill=None):
        packed = compact(scratch, counts, stride, total)
        packed[int(counts.sum()) :] = 200
        return packed

    def dirty_csr(columns, values, counts, total, spill=None):
        columns, values = csr_compact(columns, values, counts, total)
        columns[int(counts.sum()) :] = values[int(counts.sum()) :] = 200
        return columns, values

    monkeypatch.setattr(sparse.ops, "compact", dirty)
    monkeypatch.setattr(sparse.ops, "csr_compact", dirty_csr)
    x = sparse_tensor(1) / 64
    encoded, at_once = packer()[0].encode(name, x), CODECS[name].encode(x)
    assert encoded.pending and same_bits(CODECS[name].decode(encoded), CODECS[name].decode(at_once))


@pytest.mark.parametrize("name", SPARSE)
@law
@given(x=tensors(), seed=st.integers(0, 99))
def test_relu_gradients_are_the_same_before_and_after_settling(name, x, seed):
    y = torch.relu(x)
    grad = float_values(y.numel(), y.dtype, seed, 0.0, False).reshape(y.shape)
    grad = torch.where(grad.isnan(), 1.0, grad)
    p, counts = packer()
    encoded = p.encode(CODECS[name], y)
    want = torch.ops.aten.threshold_backward(grad, y, 0)
    assert same_bits(CODECS[name].relu_backward(encoded, grad), want)
    for ticket in counts.tickets:
        ticket.arrive()
    p.poll()
    assert not encoded.pending
    assert same_bits(CODECS[name].relu_backward(encoded, grad), want)


def test_counts_may_arrive_in_any_order():
    p, counts = packer(lag=9)
    xs = [sparse_tensor(seed) for seed in range(4)]
    held = [p.encode("zvc", x) for x in xs]
    settled = []
    for i in (2, 0, 3, 1):
        assert p.poll() == 0
        counts.tickets[i].arrive()
        assert p.poll() == 1
        settled.append(i)
        assert [e.pending for e in held] == [j not in settled for j in range(4)]
        assert p.waiting == 4 - len(settled)
    assert all(same_bits(CODECS["zvc"].decode(e), x) for e, x in zip(held, xs, strict=True))


def test_an_encoding_is_asked_about_after_lag_later_ones_and_never_waited_for():
    p, counts = packer(lag=2)
    held = [p.encode("csr", sparse_tensor(0))]
    counts.tickets[0].arrive()
    held.append(p.encode("csr", sparse_tensor(1)))
    assert held[0].pending and counts.tickets[0].asked == 0
    held.append(p.encode("csr", sparse_tensor(2)))
    assert not held[0].pending and counts.tickets[1].asked == 0
    held.extend(p.encode("csr", sparse_tensor(i)) for i in range(3, 8))
    assert [e.pending for e in held] == [False] + [True] * 7
    assert not any(t.waited for t in counts.tickets)


def test_bounded_waits_for_what_is_lag_back_and_holds_no_more_scratches():
    p, counts = packer(lag=2, bounded=True)
    held = []
    for i in range(6):
        held.append(p.encode("zvc", sparse_tensor(i)))
        assert p.waiting <= 2
    assert [e.pending for e in held] == [False] * 4 + [True] * 2
    assert [t.waited for t in counts.tickets] == [1, 1, 1, 1, 0, 0]
    assert p.poll() == 0 and not any(t.waited for t in counts.tickets[4:])


def test_settling_drops_the_scratch():
    p, counts = packer()
    encoded = p.encode("zvc+fp8", sparse_tensor())
    scratch = weakref.ref(encoded.payload[2])
    counts.tickets[0].arrive()
    before = encoded.nbytes
    p.poll()
    assert scratch() is None and encoded.nbytes < before


def test_what_nobody_wants_any_more_goes_with_its_scratch():
    p, counts = packer()
    encoded = p.encode("csr", sparse_tensor())
    kept = p.encode("csr", sparse_tensor(1))
    scratches = [weakref.ref(t) for t in encoded.payload]
    ticket = weakref.ref(counts.tickets[0])
    del encoded
    assert not any(ref() for ref in scratches) and p.waiting == 1
    for t in counts.tickets:
        t.arrive()
    del t
    counts.tickets.clear()
    assert p.poll() == 1 and not kept.pending
    gc.collect()
    assert ticket() is None


def test_a_count_that_cannot_be_is_refused_and_nothing_is_lost():
    p, counts = packer()
    x = sparse_tensor()
    good, bad = p.encode("zvc", x), p.encode("zvc", x)
    total = counts.tickets[1].total
    counts.tickets[1].total = x.numel() + 1
    for ticket in counts.tickets:
        ticket.arrive()
    with pytest.raises(GistError, match="codec zvc: got 3001 stored elements of 3000; the count was overwritten"):
        p.poll()
    assert not good.pending and bad.pending and same_bits(CODECS["zvc"].decode(bad), x)
    counts.tickets[1].total = total
    assert p.poll() >= 1 and not bad.pending and p.waiting == 0
    assert same_bits(CODECS["zvc"].decode(bad), x)


def test_listening_notes_what_is_stored_and_packs_nothing():
    p, counts = packer(lag=9)
    held = [p.encode("zvc", sparse_tensor(seed)) for seed in range(2)]
    counts.tickets[1].arrive()
    p.listen()
    assert [e.nonzeros for e in held] == [None, counts.tickets[1].total]
    assert all(e.pending for e in held) and not any(t.waited for t in counts.tickets)
    assert p.poll() == 1 and not held[1].pending


class Settles:
    """Something that settles its encoding in its own way, and holds it."""

    def __init__(self, p: ExactPacker, x: torch.Tensor) -> None:
        self.totals: list[int] = []
        self.encoded = p.encode("zvc", x, weakref.WeakMethod(self.settle))

    def settle(self, encoded: Encoded, total: int) -> None:
        assert encoded is self.encoded
        self.totals.append(total)


def test_a_way_of_settling_that_an_encoding_brings_is_taken_and_not_held():
    p, counts = packer(lag=1, bounded=True)
    mine = Settles(p, sparse_tensor())
    p.encode("zvc", sparse_tensor(1))
    assert mine.totals == [counts.tickets[0].total] and mine.encoded.pending and p.waiting == 0
    mine = Settles(p, sparse_tensor())
    scratch = weakref.ref(mine.encoded.payload[2])
    del mine
    assert scratch() is None and p.waiting == 0


def test_an_encoding_that_is_waited_for_makes_older_ones_due():
    p, counts = packer(lag=2, bounded=True)
    held = p.encode("zvc", sparse_tensor())
    p.encode("zvc", sparse_tensor(1))
    encoded, total = p.encode_and_wait(CODECS["zvc"], sparse_tensor(2))
    assert not held.pending and counts.tickets[0].waited == 1
    assert encoded.pending and total == CODECS["zvc"].encode(sparse_tensor(2)).nonzeros and len(counts.tickets) == 2


def test_cpu_tensors_and_fixed_sizes_need_no_transport():
    p = ExactPacker()
    x = sparse_tensor()
    assert not p.encode("zvc", x).pending and p.poll() == 0 and p.waiting == 0
    late, counts = packer()
    assert not late.encode("mask1", x).pending and not late.encode("fp8", x).pending
    assert not late.encode("zvc", x[:0]).pending and not counts.tickets


def test_settling_twice_is_refused_by_the_encoding_and_ignored_by_the_codec():
    encoded = CODECS["zvc"].encode(sparse_tensor())
    payload = encoded.payload
    CODECS["zvc"].settle(encoded, 0)
    assert encoded.payload is payload
    with pytest.raises(GistError, match="this zvc payload is exact already"):
        encoded.settle(payload, 0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="lag must be at least 1 encoding, got 0"):
        ExactPacker(lag=0)
    with pytest.raises(ValueError, match="got 'zvd'; did you mean 'zvc'"):
        ExactPacker().encode("zvd", sparse_tensor())
    with pytest.raises(TypeError, match=r"codec csr: x cannot be encoded: dtype torch.int64"):
        packer()[0].encode("csr", torch.zeros(3, dtype=torch.int64))


def test_a_backward_in_another_thread_sees_one_state_or_the_other():
    p, counts = packer(lag=1)
    xs = [sparse_tensor(seed, 2000) for seed in range(60)]
    held: list[tuple[str, Encoded, torch.Tensor]] = []
    wrong: list[str] = []
    done = threading.Event()

    def backward() -> None:
        while not done.is_set():
            for name, encoded, want in list(held):
                p.poll()
                if not same_bits(CODECS[name].decode(encoded), want):
                    wrong.append(name)

    reader = threading.Thread(target=backward)
    reader.start()
    for i, x in enumerate(xs):
        name = SPARSE[i % len(SPARSE)]
        held.append((name, p.encode(name, x), CODECS[name].decode(CODECS[name].encode(x))))
        counts.tickets[-1].arrive()
        if len(held) > 6:
            held.pop(0)
    done.set()
    reader.join()
    p.poll()
    assert not wrong and p.waiting == 0 and len(counts.tickets) == 60
