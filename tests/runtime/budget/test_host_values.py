"""The values of a sparse payload on the host: the codec's own results, and what their uses take; what scratch and
packing take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, Sparse
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.offload.host import HostValues
from tests.support.tensors import float_values, plain_nan, same_bits

SPARSE = [name for name, c in CODECS.items() if isinstance(c, Sparse)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
law = settings(deadline=None, max_examples=8, derandomize=True)


@st.composite
def cases(draw):
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 1500))
    x = torch.relu(float_values(rows * columns, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)), 0.4, False))
    x = x.reshape(rows, columns)
    return x if draw(st.booleans()) else x.t().contiguous().t(), draw(st.sampled_from((7, 900, 10**6)))


@pytest.mark.parametrize("name", SPARSE)
@law
@given(case=cases(), seed=st.integers(0, 99))
def test_it_gives_what_the_codec_gives_and_takes_a_chunk_at_most(name, case, seed):
    (x, chunk_bytes), codec = case, CODECS[name]
    body, want = HostValues(codec, codec.begin(x), x.device, chunk_bytes), codec.decode(codec.encode(x))
    grad = float_values(x.numel(), x.dtype, seed, 0.0, False).reshape(x.shape).nan_to_num(1.0)
    with LiveBytes() as live:
        values = body.dense()
        assert live.peak_bytes == values.nbytes
        masked = body.relu_backward(grad)
        assert live.peak_bytes <= values.nbytes + masked.nbytes + chunk_bytes
    assert same_bits(plain_nan(values), plain_nan(want)) and values.stride() == want.stride()
    assert same_bits(masked, codec.relu_backward(codec.encode(x), grad))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("n", [1, 70_000])
def test_scratch_and_packing_take_what_they_declare(name, dtype, n):
    form, x = CODECS[name], torch.relu(float_values(n, dtype, 0, 0.3, False))
    with LiveBytes() as live:
        encoded = form.begin(x)
        assert encoded.nbytes == live.current_bytes == form.scratch_bytes(n, dtype)
        total = int(form.total(encoded))
        live.reset_peak()
        form.settle(encoded, total)
    most = form.scratch_bytes(n, dtype) + form.packing_bytes(total, dtype) + encoded.nbytes
    assert live.peak_bytes <= most and live.current_bytes == encoded.nbytes
