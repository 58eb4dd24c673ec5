"""Integer kernels on a CUDA device against the oracle on CPU tensors, to the bit."""

import pytest
import torch

from gistkit.codecs import CODECS
from gistkit.formats import INT_FORMS
from gistkit.kernels import ops
from tests.gpu.waiting import no_synchronisation
from tests.support.kernel_laws import assert_integers
from tests.support.tensors import FLOATS, same_bits, values_of

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
widths = pytest.mark.parametrize("bits", INT_FORMS.values())


@dtypes
@widths
@pytest.mark.parametrize("n", [0, 1, 255, 256, 2**20, 2**20 + 16, 3 * 2**20 + 5, 2**23])
def test_kernels_equal_the_oracle(bits, dtype, n):
    for seed in (0, 4, 2**24 - 1):
        assert_integers(ops, values_of(n, dtype, seed, 0.2, seed == 4), bits, seed, "cuda")


@dtypes
@widths
def test_blocks_of_every_span(bits, dtype):
    powers = torch.arange(-150, 129, dtype=torch.float64)
    x = torch.linspace(-1, 1, 256, dtype=torch.float64) * 2.0 ** powers[:, None]
    x[:, ::5] = -0.0
    assert_integers(ops, x.to(dtype).flatten(), bits, 11, "cuda")


@pytest.mark.parametrize("name", INT_FORMS)
def test_a_seed_reproduces_and_no_generator_moves(name):
    x = torch.randn(100_000, device="cuda")
    torch.manual_seed(5)
    state, host = torch.cuda.get_rng_state(), torch.get_rng_state()
    with no_synchronisation():
        first = CODECS[name].encode(x)
    assert torch.equal(torch.cuda.get_rng_state(), state) and torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(6)
    other = CODECS[name].encode(x)
    torch.manual_seed(5)
    again = CODECS[name].encode(x)
    assert torch.equal(first.payload[0], again.payload[0]) and not torch.equal(first.payload[0], other.payload[0])


@widths
def test_more_than_two_to_the_31_elements(bits):
    n = 2**31 + 1024
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs 17 GB of device memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-1024:] = torch.randn(1024, dtype=torch.bfloat16, device="cuda")
    units, lows, steps = ops.int_encode(x, bits, 0)
    decoded = ops.int_decode(units, lows, steps, n, torch.bfloat16, bits)
    span = (x[-1024:].float().view(4, 256).amax(1) - x[-1024:].float().view(4, 256).amin(1))[:, None]
    error = (decoded[-1024:].float() - x[-1024:].float()).view(4, 256).abs()
    assert (error <= 1.02 * span / ((1 << bits) - 1) + 0.02).all() and not decoded[:4096].any()
    assert same_bits(lows[-4:], x[-1024:].float().view(4, 256).amin(1))
