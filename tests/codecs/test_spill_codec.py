"""Sparse encodings in arrays of a forecast capacity, with a spill for the rest: the same bits as any other way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit import formats
from gistkit.codecs import CODECS, Sparse
from gistkit.errors import GistError
from gistkit.kernels.sparse.spill import GROUP
from tests.support.tensors import FLOATS, bits, float_values, plain_nan, same_bits, tensors

SPARSE = {name: c for name, c in CODECS.items() if isinstance(c, Sparse)}
WITHIN = {name: c for name, c in SPARSE.items() if c.packs_within}
UNTOUCHED = 0x5A


def count() -> torch.Tensor:
    """Where the number of stored elements goes."""
    return torch.zeros((), dtype=torch.int64)


def run_of(codec: Sparse, x: torch.Tensor, capacity: int) -> torch.Tensor:
    return torch.full((codec.spill_bytes(x.numel(), x.dtype, capacity),), UNTOUCHED, dtype=torch.uint8)


def stored(codec: Sparse, x: torch.Tensor) -> int:
    nonzeros = codec.encode(x).nonzeros
    assert nonzeros is not None
    return nonzeros


def capacities(codec: Sparse, x: torch.Tensor) -> dict[str, int]:
    """From nothing fits to all of it does: around the total, one group less, half of it."""
    total, whole = stored(codec, x), formats.ceil_div(x.numel(), codec.slot) * codec.slot
    exact = formats.ceil_div(total, 8) * 8
    asked = {"least": 8, "half": total // 16 * 8, "a group less": exact - GROUP, "one less": exact - 8, "exact": exact}
    asked |= {"more": exact + 8, "all": whole}
    return {name: min(max(c, 8), whole) for name, c in asked.items()}


@st.composite
def cases(draw: st.DrawFn):
    """Values of which several groups may spill, of any dtype and density, rank and layout for the shorter ones."""
    if draw(st.booleans()):
        return draw(tensors(draw(st.sampled_from(FLOATS))).filter(torch.Tensor.numel))
    n = draw(st.sampled_from([GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, 3 * GROUP + 255, 40_000]))
    zeros, seed = draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])), draw(st.integers(0, 2**20))
    x = float_values(n, draw(st.sampled_from(FLOATS)), seed, zeros, draw(st.booleans()))
    if draw(st.booleans()):
        x[draw(st.integers(0, n)) :] = 0
    return x


def check_reads(codec: Sparse, encoded, plain, grad) -> None:
    whole = codec.decode(plain)
    assert same_bits(codec.decode(encoded), whole) and codec.decode(encoded).stride() == whole.stride()
    assert same_bits(codec.relu_backward(encoded, grad), codec.relu_backward(plain, grad))


@pytest.mark.parametrize("name", WITHIN)
@settings(max_examples=15)
@given(x=cases(), which=st.sampled_from(["least", "half", "a group less", "one less", "exact", "more", "all"]))
def test_reading_gives_the_same_bits_before_and_after_settling(name, x, which):
    codec = WITHIN[name]
    x = x if codec.lossless else plain_nan(x)
    plain = codec.encode(x)
    total, capacity = stored(codec, x), capacities(codec, x)[which]
    counted = count()
    encoded = codec.begin_within(x, capacity, run_of(codec, x, capacity), counted)
    assert encoded.pending and encoded.nonzeros is None
    assert codec.total(encoded).item() == counted.item() == total
    assert encoded.nbytes == codec.within_bytes(x.numel(), x.dtype, capacity)
    grad = float_values(x.numel(), x.dtype, 1, 0.1, False).view(x.shape)
    check_reads(codec, encoded, plain, grad)
    codec.settle(encoded, total)
    assert (encoded.pending, encoded.state()[2] is not None, encoded.nonzeros) == (False, total > capacity, total)
    assert encoded.nbytes == codec.within_bytes(x.numel(), x.dtype, capacity)
    check_reads(codec, encoded, plain, grad)


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("zeros", (0.0, 0.5, 1.0))
def test_groups_that_end_within_the_capacity_lie_in_the_arrays_and_all_others_in_the_spill(name, zeros):
    codec = WITHIN[name]
    x = float_values(5 * GROUP + 300, torch.float32, 1, zeros, False)
    words, _, values, _ = codec.encode(x).payload
    columns = words if codec.slot == 256 else None
    ends = [stored(codec, x[: GROUP * (i + 1)]) for i in range(6)]
    for capacity in sorted({c for e in ends for c in (max(e // 8 * 8, 8), max(-(-e // 8) * 8, 8))}):
        spill = run_of(codec, x, capacity)
        got_index, _, got, _ = codec.begin_within(x, capacity, spill, count()).payload
        inside = max([e for e in ends if e <= capacity], default=0)
        assert same_bits(bits(got)[:inside], bits(values)[:inside])
        item = values.element_size()
        rest = slice((inside - capacity + GROUP) * item, (ends[-1] - capacity + GROUP) * item)
        if inside < ends[-1]:
            assert same_bits(spill[rest].view(values.dtype), values[inside:])
        if columns is not None:
            assert torch.equal(got_index[:inside], columns[:inside])
        touched = (spill != UNTOUCHED).nonzero()
        assert inside < ends[-1] or not touched.numel()


@pytest.mark.parametrize("name", WITHIN)
def test_an_untouched_spill_is_let_go_of_and_a_needed_one_kept(name):
    codec, x = WITHIN[name], float_values(3 * GROUP, torch.float32, 1, 0.5, False)
    total = stored(codec, x)
    for capacity, kept in ((formats.ceil_div(total, 8) * 8, False), (total // 2 // 8 * 8, True)):
        spill = run_of(codec, x, capacity)
        encoded = codec.begin_within(x, capacity, spill, count())
        copy = encoded.over(tuple(t.clone() for t in encoded.payload))
        assert encoded.state()[2] is spill
        codec.settle(encoded, total)
        codec.settle(encoded, total)  # of no effect
        assert encoded.state()[2] is (spill if kept else None)
        assert same_bits(codec.decode(copy), codec.decode(encoded)), "a copy has its spill for as long as it lives"
        assert (encoded.over(encoded.payload).state()[2] is not None) is kept


@pytest.mark.parametrize("name", WITHIN)
def test_a_total_that_cannot_be_is_refused(name):
    codec, x = WITHIN[name], torch.ones(3000)
    encoded = codec.begin_within(x, 8, run_of(codec, x, 8), count())
    for total in (-1, 3001):
        with pytest.raises(GistError, match=f"got {total} stored elements of 3000; the count was overwritten"):
            codec.settle(encoded, total)
    assert encoded.pending and same_bits(codec.decode(encoded), x)


@pytest.mark.parametrize("name", WITHIN)
def test_nothing_to_encode_is_settled_at_once(name):
    codec, x = WITHIN[name], torch.empty(0, 3)
    assert codec.capacity(0, 0.5) == codec.spill_bytes(0, x.dtype, 0) == 0
    encoded = codec.begin_within(x, 0, torch.empty(0, dtype=torch.uint8), count())
    assert not encoded.pending and encoded.state()[2] is None and codec.decode(encoded).shape == (0, 3)


@pytest.mark.parametrize("name", ("zvc", "csr+fp8"))
@given(n=st.integers(1, 3_000_000), density=st.floats(0, 1.2))
def test_capacities_are_rounded_up_by_less_than_a_256th_and_eight_items(name, n, density):
    codec = WITHIN[name]
    whole = formats.ceil_div(n, codec.slot) * codec.slot
    capacity = codec.capacity(n, density)
    assert capacity % 8 == 0 and 8 <= capacity <= whole
    assert min(density * n, whole) <= capacity <= density * n + 1 + 8 + whole / 256
    room = codec.spill_bytes(n, torch.bfloat16, capacity)
    item = 1 if name.endswith("fp8") else 2
    assert room % 512 == 0
    if capacity == whole:
        assert room == 0
    else:
        least = (whole - capacity + GROUP) * (item + (codec.slot == 256))
        assert least <= room < least + 1024


def test_codecs_whose_packed_values_depend_on_their_number_refuse():
    assert sorted(WITHIN) == ["csr", "csr+fp16", "csr+fp8", "zvc", "zvc+fp16", "zvc+fp8"]
    for name in SPARSE.keys() - WITHIN.keys():
        with pytest.raises(GistError, match=f"codec {name.replace('+', '.')}: begin_within .*; use begin and settle"):
            SPARSE[name].begin_within(torch.ones(9), 8, torch.empty(99_999, dtype=torch.uint8), count())
