"""Delayed exact packing: the state machine, driven by counts that arrive when the test says so."""

import gc
import weakref
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, Sparse
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from tests.support.tensors import float_values, plain_nan, same_bits, tensors

SPARSE = [name for name, c in CODECS.items() if isinstance(c, Sparse)]
law = settings(max_examples=5)
SLOTS = cycle(torch.zeros(10_000, dtype=torch.int64).unbind())
"""Made before any bytes are counted."""


class LateTicket:
    """A count that arrives when ``arrive`` is called."""

    def __init__(self, slot: torch.Tensor) -> None:
        self.slot, self.here = slot, False
        self.asked = self.waited = 0

    @property
    def total(self) -> int:
        return int(self.slot)

    def sent(self) -> None:
        pass

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

    def open(self, device: torch.device) -> LateTicket:
        self.tickets.append(LateTicket(next(SLOTS)))
        return self.tickets[-1]

    def send(self, total: torch.Tensor) -> LateTicket:
        assert total.shape == () and total.dtype == torch.int64
        ticket = self.open(total.device)
        ticket.slot.copy_(total)
        return ticket

    def arrive(self) -> None:
        for ticket in self.tickets:
            ticket.arrive()

    @property
    def waited(self) -> int:
        return sum(ticket.waited for ticket in self.tickets)


def packer(**options) -> tuple[ExactPacker, LateCounts]:
    counts = LateCounts()
    return ExactPacker(transport=lambda: counts, **options), counts


def waiting(p: ExactPacker) -> int:
    """How many encodings still hold a scratch."""
    return sum(item.encoded() is not None for item in p._waiting)


def sparse_tensor(seed: int = 0, n: int = 3000) -> torch.Tensor:
    return torch.relu(float_values(n, torch.float32, seed, 0.3, False))


@pytest.mark.parametrize("name", SPARSE)
@law
@given(x=tensors(), seed=st.integers(0, 99))
def test_values_and_relu_gradients_are_the_same_before_and_after_settling(name, x, seed):
    p, counts = packer()
    codec, y = CODECS[name], torch.relu(x)
    grad = float_values(y.numel(), y.dtype, seed, 0.0, False).reshape(y.shape).nan_to_num(1.0)
    masked = torch.ops.aten.threshold_backward(grad, y, 0)
    encoded, at_once, of_relu = p.encode(codec, x), codec.encode(x), p.encode(codec, y)
    want = codec.decode(at_once)
    assert encoded.pending == of_relu.pending == (x.numel() > 0) and not at_once.pending
    for settled in (False, True):
        found = codec.decode(encoded)
        assert same_bits(plain_nan(found), plain_nan(want)) and found.stride() == want.stride()
        assert same_bits(codec.relu_backward(of_relu, grad), masked)
        counts.arrive()
        assert settled or p.poll() == len(counts.tickets)
    assert not encoded.pending and not of_relu.pending
    assert all(same_bits(a, b) for a, b in zip(encoded.payload, at_once.payload, strict=True))
    assert encoded.nbytes == at_once.nbytes and encoded.nonzeros == at_once.nonzeros


def test_an_encoding_is_asked_about_after_lag_later_ones_and_never_waited_for():
    p, counts = packer(lag=2)
    held = [p.encode(CODECS["csr"], sparse_tensor(0))]
    counts.tickets[0].arrive()
    held.append(p.encode(CODECS["csr"], sparse_tensor(1)))
    assert held[0].pending and counts.tickets[0].asked == 0
    held.append(p.encode(CODECS["csr"], sparse_tensor(2)))
    assert not held[0].pending and counts.tickets[1].asked == 0
    held.extend(p.encode(CODECS["csr"], sparse_tensor(i)) for i in range(3, 8))
    assert [e.pending for e in held] == [False] + [True] * 7
    assert counts.waited == 0


def test_bounded_waits_for_what_is_lag_back_and_holds_no_more_scratches():
    p, counts = packer(lag=2, bounded=True)
    held = []
    for i in range(6):
        held.append(p.encode(CODECS["zvc"], sparse_tensor(i)))
        assert waiting(p) <= 2
    assert [e.pending for e in held] == [False] * 4 + [True] * 2
    assert [t.waited for t in counts.tickets] == [1, 1, 1, 1, 0, 0]
    assert p.poll() == 0 and not any(t.waited for t in counts.tickets[4:])


def test_what_nobody_wants_any_more_goes_with_its_scratch():
    p, counts = packer()
    encoded = p.encode(CODECS["csr"], sparse_tensor())
    kept = p.encode(CODECS["csr"], sparse_tensor(1))
    scratches = [weakref.ref(t) for t in encoded.payload]
    ticket = weakref.ref(counts.tickets[0])
    del encoded
    assert not any(ref() for ref in scratches) and waiting(p) == 1
    counts.arrive()
    counts.tickets.clear()
    assert p.poll() == 1 and not kept.pending
    gc.collect()
    assert ticket() is None


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_and_packing_take_what_they_declare(name, dtype):
    n = 70_000
    form, x = CODECS[name], torch.relu(float_values(n, dtype, 0, 0.3, False))
    with LiveBytes() as live:
        encoded = form.begin(x)
        assert encoded.nbytes == live.current_bytes == form.scratch_bytes(n, dtype)
        total = int(form.total(encoded))
        live.reset_peak()
        form.settle(encoded, total)
    most = form.scratch_bytes(n, dtype) + form.packing_bytes(total, dtype) + encoded.nbytes
    assert live.peak_bytes <= most and live.current_bytes == encoded.nbytes
