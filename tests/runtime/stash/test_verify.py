"""Bits compared in little memory: every bit counts, rows are told apart, and it takes what the planner counts."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gistkit
from gistkit.capture.calls import BatchNorm
from gistkit.ir.comparison import digest_bytes, norm_bytes, part_bytes
from gistkit.nn import norm
from gistkit.planning.policies.gist_rules import gist
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.program.program import Program
from gistkit.runtime.rebuild import probed as telling
from gistkit.runtime.rebuild.exactness import arithmetic, try_drawn
from gistkit.runtime.rebuild.probed import Kind, told, told_ahead
from gistkit.runtime.stash.verify import Digest, Trial, blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex128]
few = settings(deadline=None, max_examples=40, derandomize=True)


def laid_out(shape, order, dtype=torch.float32, seed=0):
    """Random numbers whose dimensions lie in memory in that order, outermost first."""
    x = torch.randn([shape[d] for d in order], generator=torch.Generator().manual_seed(seed))
    inverse = [order.index(d) for d in range(len(order))]
    return (x * 3).to(dtype).permute(inverse)


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))), st.integers(1, 2000))
@few
def test_blocks_cover_a_tensor_once_in_dense_pieces(case, nbytes):
    shape, order = case
    x, seen = laid_out(shape, list(order)), torch.zeros(shape, dtype=torch.int64)
    for index in blocks(x, nbytes):
        part = x[index]
        assert part.numel() * 4 <= max(nbytes, 4)
        assert torch.ops.aten.is_non_overlapping_and_dense(part)
        seen[index] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.sampled_from([(5, 7, 3, 3), (1, 900), (64, 50), (2000,)]), st.integers(0, 10**6), st.integers(0, 62))
@settings(deadline=None, max_examples=15, derandomize=True)
def test_a_bit_that_differs_is_seen(dtype, shape, at, bit):
    x = laid_out(shape, list(range(len(shape))), dtype)
    digest, y = Digest(x), x.clone()
    assert digest.matches(y)
    flat = y.view(-1).view(torch.uint8)
    # a bool has one bit
    at, bit = at % flat.numel(), 0 if dtype is torch.bool else bit % 8
    flat[at] ^= 1 << bit
    assert not digest.matches(y)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3)])
def test_rows_have_digests_of_their_own(order):
    x = laid_out((6, 4, 5, 5), list(order))
    digest = Digest(x)
    assert digest.rows == (6 if order[0] == 0 else 1)
    assert digest.matches(x.clone())
    if digest.rows == 6:
        assert digest.matches(x[2:4], (2, 4)) and not digest.matches(x[2:4], (3, 5))


def test_two_swapped_elements_are_seen():
    x = torch.arange(8192.0).view(2, -1)
    digest = Digest(x)
    for a, b in ((0, 1), (0, 4095), (17, 2048 + 17), (100, 100 + 64)):
        y = x.clone()
        y[0, [a, b]] = y[0, [b, a]]
        assert not digest.matches(y)
    assert not digest.matches(x.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (4, 64, 32, 32), (512, 20), (1, 100_000), (100_000,)])
def test_a_digest_takes_what_the_planner_counts(shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    with LiveBytes() as live:
        live.track(x)
        there = live.current_bytes
        Digest(x).matches(x)
    assert live.peak_bytes - there <= digest_bytes(there, shape[0])


def test_a_trial_takes_the_first_exact_way_and_hands_on_no_other():
    x, told = torch.randn(4, 100), []

    def way(values):
        return lambda rows: (values if rows is None else values[slice(*rows)]).clone()

    off = x.clone()
    off[3, 50] += 1
    trial = Trial([way(off), way(x)], Digest(x), told.append)
    assert torch.equal(trial((0, 2)), x[:2]) and told == []  # as far as is known the first is exact
    assert torch.equal(trial((2, 4)), x[2:]) and told == []
    assert torch.equal(trial(None), x) and told == [1]
    assert torch.equal(trial((1, 3)), x[1:3]) and told == [1]

    def refuse(number):
        assert number is None
        raise ArithmeticError("none is exact")

    with pytest.raises(ArithmeticError, match="none is exact"):
        Trial([way(off)], Digest(x), refuse)(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 64, 32, 32), (8, 100), (2, 16, 5, 5), (4, 3, 64, 64)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_batch_norms_arithmetic_is_found_in_the_room_of_its_output(shape, dtype, channels_last):
    x = torch.randn(shape).to(dtype)
    if channels_last:
        if len(shape) != 4:
            pytest.skip("no such layout")
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(shape[1]), torch.zeros(shape[1])
    call, verified = BatchNorm(x, None, None, weight, bias, True, 0.1, 1e-5), {}
    with LiveBytes() as plain:
        y, mean, invstd, _, _ = torch._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, False)
        del y, mean, invstd
    told(verified, Kind.of(x, weight, 1e-5))  # ahead of a forward under a budget
    with LiveBytes() as live:
        try_drawn(verified, 0, call)
        y, mean, invstd, _, _ = torch._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, False)
        found = arithmetic(verified, 0, call, y, (mean, invstd))
    assert found is not None
    nbytes = x.numel() * x.element_size()
    assert live.peak_bytes <= plain.peak_bytes + norm_bytes(nbytes, shape[1], x.element_size())
    assert torch.equal(found(x, mean, invstd, weight, bias), F.batch_norm(x, None, None, weight, bias, True))


def test_parts_are_few_and_small():
    assert [part_bytes(n) for n in (0, 100, 2048, 64 * 512, 2**30)] == [0, 100, 512, 512, 2**24]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_arithmetics_are_told_apart_by_few_elements_of_16_bits(dtype, monkeypatch):
    # by outputs of ordinary size, 14 to 30 of 30 wrong ones passed in 16 bits
    wrong = [c for c in norm.KERNEL_CANDIDATES if c.args[0] not in ("fused", "split")]
    monkeypatch.setattr(telling, "rebuild_candidates", lambda x: [*wrong, norm._stepwise, norm._fused])
    for seed in range(10):
        x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
        layer, verified = torch.nn.BatchNorm2d(8), {}
        operands = BatchNorm(x, None, None, layer.weight, layer.bias, True, 0.1, 1e-5)
        try_drawn(verified, 0, operands)
        (able,) = [found for key, found in verified.items() if key[0] == "drawn"]
        assert able == [norm._fused], seed


def test_what_was_forgotten_is_told_again_before_a_forward():
    """The engine forgets all that it knows to be exact now and then; under a budget there is room ahead only."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 4, 3))
    x = torch.randn(4, 3, 20, 20)
    graph = gistkit.capture(model, (x,))
    program, verified = Program(graph, gist(graph)), {}
    assert program.norms()
    told_ahead(verified, program, (x,), {})
    known = dict(verified)
    verified.clear()
    told_ahead(verified, program, (x,), {})
    assert known.keys() == verified.keys() and len(known) == 2
    for layout in (torch.contiguous_format, torch.channels_last):
        met = torch.empty((4, 32, 18, 18), memory_format=layout)
        assert told(verified, Kind.of(met, model[1].weight, 1e-5)) and verified.keys() == known.keys()
