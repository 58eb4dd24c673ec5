"""Mask kernels under Triton's interpreter, bit for bit against the oracle."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit.kernels.mask import mask as kernels
from gistkit.kernels.reference import mask as reference
from tests.support.kernel_laws import assert_masks
from tests.support.tensors import FLOATS, same_bits, values_of

# NaN and infinity times zero: numpy, which stands in for the GPU here, reports what is meant to happen
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@contextmanager
def negative_zeros(keep: bool) -> Iterator[None]:
    """PyTorch's ReLU of -0.0 taken to be -0.0 or +0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "relu_keeps_negative_zero", lambda x: keep)
        yield


@dtypes
@pytest.mark.parametrize("keep_zero", [False, True])
@settings(max_examples=2)
@given(n=st.integers(0, 40), seed=st.integers(0, 9999))
@example(n=4104, seed=1)
@example(n=4097, seed=2)
def test_kernels_equal_the_oracle(dtype, keep_zero, n, seed):
    with negative_zeros(keep_zero):
        assert_masks(kernels, n, dtype, seed, "cpu", keep_zero)


@settings(max_examples=4)
@given(rows=st.integers(1, 1200), seed=st.integers(0, 99))
@example(rows=513, seed=1)
def test_flags_by_words(rows, seed):
    flags = values_of(16 * rows, torch.bool, seed, 0.0, False)
    mask = kernels.bits_encode(flags)
    assert torch.equal(mask, reference.bits_encode(flags))
    assert torch.equal(kernels.bits_decode(mask, 16 * rows), flags)
    # not at an address for words: flag by flag
    assert torch.equal(kernels.bits_encode(flags[1:]), reference.bits_encode(flags[1:]))
    if rows > 1:
        part = 16 * (rows - 1)
        assert torch.equal(kernels.bits_encode(flags[8:-8]), reference.bits_encode(flags[8:-8]))
        assert torch.equal(kernels.bits_encode(flags[1 : 1 + part]), reference.bits_encode(flags[1 : 1 + part]))


def test_every_byte_but_zero_is_a_set_flag():
    # every byte at every place of a word, beside zeros and beside 255
    for beside in (0, 255):
        flags = torch.full((4, 256, 4), beside, dtype=torch.uint8)
        flags[torch.arange(4), :, torch.arange(4)] = torch.arange(256).to(torch.uint8)
        mask = kernels.bits_encode(flags.view(-1).view(torch.bool))
        assert torch.equal(mask, reference.bits_encode(flags.view(-1) != 0))


@dtypes
@pytest.mark.parametrize("keep_zero", [False, True])
def test_in_place_relu_and_nan_payloads(dtype, keep_zero):
    x = values_of(700, dtype, 3, 0.1, True)
    x[5:300:7] = -0.0
    y = x.clone()
    with negative_zeros(keep_zero):
        mask = kernels.relu_mask1_(y)
    assert torch.equal(mask, reference.mask1_encode(x))
    kept = ~(x < 0) if keep_zero else ~(x <= 0)
    assert same_bits(y[kept], x[kept]), "NaN pass with their payloads, and -0.0 where it is kept"
    assert not y[~kept].any() and not torch.signbit(y[~kept]).any()
