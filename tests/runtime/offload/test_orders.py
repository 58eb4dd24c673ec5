"""The offloader against a device that runs late and in every order that its events allow.

Some 10,000 orders, the same ones each time. ``GISTKIT_ORDERS=20000`` draws 100,000 others.
"""

import os
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, Encoded
from gistkit.errors import HostMemoryError
from gistkit.runtime.offload.offloader import Offloader
from tests.support.streams import Streams

SIZES = (0, 1, 96, 500, 1300)
SCARCE, PLENTY = (12_000, 30_000), (60_000, 60_000)
"""(device, host) bytes."""


class Step(NamedTuple):
    """What is done with which parcel, counted from the newest; ``size`` is a put's, ``on`` the current stream."""

    what: str
    which: int
    size: int
    on: str


class Limits(NamedTuple):
    arena_bytes: int
    run_ahead_bytes: int
    arrival_bytes: int
    lane_bytes: int = 0


KINDS = ("put", "encoding", "sparse", "kept", "prefetch", "get", "drop", "trim", "release", "work", "fail")
steps = st.builds(
    Step,
    st.sampled_from((*KINDS, "sparse", "get")),
    st.integers(0, 5),
    st.integers(0, len(SIZES) - 1),
    st.sampled_from(("c0", "c0", "c0", "c1")),
)
limits = st.builds(Limits, *(st.sampled_from((0, 700, 4096, 12_000)) for _ in range(4)))


def backward_of(plan: list[Step]) -> list[Step]:
    """The plan as a forward, and a backward in stack order: the next parcel is prefetched before one is got."""
    forward = [step for step in plan if step.what not in ("prefetch", "get", "drop", "fail")]
    parcels = sum(step.what in ("put", "encoding", "sparse", "kept") for step in forward)
    one = [Step("prefetch", 1, 0, "c0"), Step("get", 0, 0, "c0"), Step("work", 0, 2, "c0"), Step("drop", 0, 0, "c0")]
    return forward + parcels * one


@cache
def sparse(name: str, elements: int, number: int) -> tuple[Encoded, torch.Tensor]:
    """An encoding of drawn values, one of any density, and what it decodes to."""
    drawn = np.random.default_rng(number)
    x = torch.from_numpy(drawn.standard_normal(elements, np.float32))
    x[torch.from_numpy(drawn.random(elements) > drawn.random())] = 0
    encoded = CODECS[name].begin(x)
    return encoded, CODECS[name].decode(encoded)


class Run:
    """One plan on one or more offloaders of one device; what is read is compared when all has run."""

    def __init__(self, seed: int, limits: Limits, offloaders: int = 1, memory: tuple[int, int] = SCARCE) -> None:
        self.device = Streams(seed, *memory)
        self.offloaders = [Offloader(self.device, *limits) for _ in range(offloaders)]
        self._values = np.random.default_rng(seed)
        self._parcels: list[tuple] = []
        self._sources: list[torch.Tensor] = []
        self._read: list[tuple[np.ndarray, np.ndarray]] = []

    def do(self, plan: list[Step]) -> None:
        for number, step in enumerate(plan):
            self.device.current = step.on
            at = len(self._parcels) - 1 - step.which
            if at < 0 and step.what in ("prefetch", "get", "drop", "release"):
                continue
            try:
                getattr(self, f"_{step.what}")(step, self.offloaders[number % len(self.offloaders)], at)
            except (torch.OutOfMemoryError, HostMemoryError, _FailedError):
                self._parcels, self._sources = [], []  # as an exception's traceback lets go of them

    def end(self) -> None:
        """Everything was read as it was put; nothing is left behind."""
        self._parcels, self._sources = [], []
        for offloader in self.offloaders:
            offloader.trim(0)
        self.device.finish()
        assert not self.device.violations, self.device.violations[0]
        for read, expected in self._read:
            assert np.array_equal(read, expected), "other bytes came back"
        for offloader in self.offloaders:
            used = offloader.arena.used_bytes - offloader.lanes.nbytes
            left = used, offloader.outgoing_bytes, offloader.arriving_bytes
            assert left == (0, 0, 0), f"(arena, outgoing, arriving) bytes left: {left}"
        assert self.device.synchronized == 0, "the host has waited"
        for offloader in self.offloaders:
            offloader.close()
        assert self.device.held_bytes(False) == 0, "device memory is left"
        assert self.device.held_bytes(True) == 0, "host memory is left"

    def _put(self, step: Step, offloader: Offloader, at: int) -> None:
        values = self._values.integers(0, 128, SIZES[step.size], np.uint8)
        x = self.device.write(values)
        self._parcels.append((offloader.put(x), (values,)))

    def _encoding(self, step: Step, offloader: Offloader, at: int) -> None:
        values = [self._values.integers(0, 128, n, np.uint8) for n in (SIZES[step.size], 8, 33)]
        x = [self.device.write(v) for v in values]
        form = torch.empty(5, 3, device="meta")
        self._parcels.append((offloader.put(Encoded("zvc", tuple(x), form)), tuple(values)))

    def _sparse(self, step: Step, offloader: Offloader, at: int) -> None:
        """An encode's scratch, of whose size the host knows the worst case."""
        name = ("zvc", "csr", "zvc+fp8")[step.which % 3]
        encoded, decoded = sparse(name, SIZES[step.size] + 1, int(self._values.integers(64)))
        self._parcels.append((offloader.put(self.device.holding(encoded)), decoded))

    def _kept(self, step: Step, offloader: Offloader, at: int) -> None:
        """A put of what somebody else holds as well."""
        values = self._values.integers(0, 128, SIZES[step.size], np.uint8)
        self._sources.append(self.device.write(values))
        self._parcels.append((offloader.put(self._sources[-1]), (values,)))

    def _prefetch(self, step: Step, offloader: Offloader, at: int) -> None:
        self._parcels[at][0].prefetch()

    def _get(self, step: Step, offloader: Offloader, at: int) -> None:
        parcel, expected = self._parcels[at]
        got = parcel.get()
        if isinstance(expected, torch.Tensor):
            self.device.run(step.on, partial(self._note_decoded, got.over(()), expected), *got.payload)
            return
        payload = got.payload if isinstance(got, Encoded) else (got,)
        for t, values in zip(payload, expected, strict=True):
            if len(values):
                self.device.run(step.on, partial(self._note, values), t)

    def _note(self, values: np.ndarray, t: torch.Tensor) -> None:
        self._read.append((t.numpy().copy(), values))

    def _note_decoded(self, form: Encoded, x: torch.Tensor, *payload: torch.Tensor) -> None:
        self._read.append((CODECS[form.codec].decode(form.over(payload)).numpy(), x.numpy()))

    def _drop(self, step: Step, offloader: Offloader, at: int) -> None:
        del self._parcels[at]

    def _trim(self, step: Step, offloader: Offloader, at: int) -> None:
        offloader.trim(SIZES[step.size])

    def _release(self, step: Step, offloader: Offloader, at: int) -> None:
        self._parcels[at][0].release()

    def _work(self, step: Step, offloader: Offloader, at: int) -> None:
        """A kernel of the computation, with memory of its own that goes at once."""
        self.device.write(np.zeros(SIZES[step.size], np.uint8))

    def _fail(self, step: Step, offloader: Offloader, at: int) -> None:
        raise _FailedError


class _FailedError(Exception):
    """A forward or backward that raises."""


SEEDS = 5
plans = st.lists(steps, min_size=1, max_size=24)
ORDERS = os.environ.get("GISTKIT_ORDERS", "")
orders = settings(deadline=None, derandomize=not ORDERS, max_examples=int(ORDERS or 2000) // SEEDS)
"""A test's, two thousand unless the environment has another number."""


def carried_out(plan, bounds, offloaders=1):
    for seed in range(SEEDS):
        run = Run(seed, bounds, offloaders)
        run.do(plan)
        run.end()


@given(plans, limits)
@orders
def test_any_order_of_calls(plan, bounds):
    carried_out(plan, bounds)


PUTS = [Step("put", 0, 3, "c0"), Step("put", 0, 4, "c0")]
NO_ROOM_FOR_A_LANE = [*PUTS, Step("sparse", 0, 0, "c0"), Step("sparse", 0, 0, "c0"), Step("sparse", 1, 0, "c0")]
"""The device has no memory for a lane's cells, whose span must go back then."""


@given(plans, limits)
@example(NO_ROOM_FOR_A_LANE, Limits(0, 12_000, 0, 0))
@orders
def test_forward_and_backward_twice(plan, bounds):
    """The second step's spans are those that the first has read."""
    carried_out(backward_of(plan) + backward_of(plan), bounds)


@given(plans, limits)
@orders
def test_forwards_before_their_backwards(plan, bounds):
    """Gradient accumulation over graphs that live together, and two models on one device."""
    forward, both = [s for s in plan if s.what in ("put", "encoding", "sparse", "work")], backward_of(plan)
    carried_out(forward + both, bounds, offloaders=2)


@given(st.lists(st.tuples(st.sampled_from(("put", "sparse")), st.sampled_from(("c0", "c1"))), min_size=4, max_size=12))
@orders
def test_streams_that_do_not_wait_for_each_other_share_an_arena(turns):
    """What one stream has fetched, the other one's next put overwrites."""
    plan = [Step(what, 0, 4, on) for kind, on in turns for what in (kind, "get", "drop")]
    carried_out(plan, Limits(4096, 0, 0))


@given(plans, limits, st.integers(0, 2**32))
@orders
def test_any_order_under_any_seed(plan, bounds, seed):
    for offset in range(SEEDS):
        run = Run(seed + offset, bounds, 2)
        run.do(plan + plan[::-1])
        run.end()


@pytest.mark.parametrize("seed", range(8))
def test_long_training_keeps_its_host_memory(seed):
    """Fifty steps, a parcel of each alive until the next one's forward is over: the arena does not grow."""
    run = Run(seed, Limits(40_000, 3000, 3000, 14_000), memory=PLENTY)
    kinds = ("put", "sparse", "sparse", "put", "put", "sparse")
    puts = [Step(kind, size, size, "c0") for size, kind in zip((2, 3, 4, 2, 4, 3), kinds, strict=True)]
    backward = [Step("prefetch", 1, 0, "c0"), Step("get", 0, 0, "c0"), Step("drop", 0, 0, "c0")]
    run.do(50 * [*puts, Step("drop", 6, 0, "c0"), *5 * backward])
    assert len(run.offloaders[0].arena.chunks) == 1
    run.end()
