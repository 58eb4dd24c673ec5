"""The offloader against a device that runs late and in every order that its events allow.

Some 1,250 orders, the same ones each time. ``GISTKIT_ORDERS=20000`` draws 100,000 others.
"""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.offload_orders import PLENTY, Limits, Run, Step, backward_of, limits, steps

SEEDS = 5
plans = st.lists(steps, min_size=1, max_size=24)
ORDERS = os.environ.get("GISTKIT_ORDERS", "")
orders = settings(deadline=None, derandomize=not ORDERS, max_examples=int(ORDERS or 250) // SEEDS)
"""A test's, a quarter thousand unless the environment has another number."""


def carried_out(plan, bounds, offloaders=1):
    for seed in range(SEEDS):
        run = Run(seed, bounds, offloaders)
        run.do(plan)
        run.end()


@given(plans, limits)
@orders
def test_any_order_of_calls(plan, bounds):
    carried_out(plan, bounds)


@given(plans, limits)
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
