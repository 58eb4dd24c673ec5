"""Integer kernels under Triton's interpreter, bit for bit against the oracle, NaN included."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit.formats import INT_FORMS
from gistkit.kernels.narrow import integers as kernels
from tests.support.kernel_laws import assert_integers
from tests.support.tensors import FLOATS, values_of

# arithmetic on infinities and NaN: numpy, which stands in for the GPU here, reports what is meant to happen
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", INT_FORMS.values())
@settings(max_examples=3)
@given(n=st.integers(0, 600), seed=st.integers(0, 2**24 - 1))
@example(n=4096, seed=2**24 - 1)
@example(n=4096 + 255, seed=0)
def test_kernels_equal_the_oracle(bits, dtype, n, seed):
    x = values_of(n, dtype, seed % 9999, 0.2, seed % 5 == 0)
    assert_integers(kernels, x, bits, seed, "cpu", FLOATS if n < 600 else (dtype,))


@pytest.mark.parametrize("bits, dtype", [(4, torch.float32), (4, torch.bfloat16), (2, torch.float16)], ids=str)
def test_blocks_of_every_span(bits, dtype):
    """A block a power of two: spans from nothing to more than fp32 has, zeros of both signs among the values."""
    powers = torch.tensor([*range(-150, 120, 4), *range(120, 129)], dtype=torch.float64)
    x = torch.linspace(-1, 1, 256, dtype=torch.float64) * 2.0 ** powers[:, None]
    x[:, ::5] = -0.0
    assert_integers(kernels, x.to(dtype).flatten(), bits, 11, "cpu", (dtype,))
