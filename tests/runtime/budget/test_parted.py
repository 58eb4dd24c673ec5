"""A sparse payload on the host whose parts come back for each use: the codec's own results, and what they take; what
scratch and packing take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, Sparse
from gistkit.kernels.layout import flat
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.offload.host import PartedBody, sent_encoding
from tests.support.tensors import float_values, plain_nan, same_bits

EXACT = [name for name, c in CODECS.items() if isinstance(c, Sparse) and c.scaling == "none"]
SCALED = [name for name, c in CODECS.items() if isinstance(c, Sparse) and c.scaling != "none"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")
law = settings(deadline=None, max_examples=8, derandomize=True)


def parted(name, x, within_bytes):
    codec = CODECS[name]
    return PartedBody(codec, sent_encoding(codec.begin(x)), CPU, within_bytes)


@st.composite
def cases(draw):
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 1500))
    x = torch.relu(float_values(rows * columns, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)), 0.4, False))
    x = x.reshape(rows, columns)
    return x if draw(st.booleans()) else x.t().contiguous().t(), draw(st.sampled_from((0, 9_000, 40_000, 10**6)))


@pytest.mark.parametrize("name", EXACT)
@law
@given(case=cases(), seed=st.integers(0, 99))
def test_the_parts_give_what_the_codec_gives_of_the_whole(name, case, seed):
    x, within_bytes = case
    body, codec = parted(name, x, within_bytes), CODECS[name]
    want = codec.decode(codec.encode(x))
    assert same_bits(plain_nan(body.dense()), plain_nan(want)) and body.dense().stride() == want.stride()
    start, stop = sorted((seed * x.numel() // 99, x.numel() // 2))
    assert same_bits(plain_nan(body.dense_range(start, stop)), plain_nan(flat(want)[start:stop]))
    assert same_bits(plain_nan(body.dense_rows(0, 1)), plain_nan(want[:1]))
    grad = float_values(x.numel(), x.dtype, seed, 0.0, False).reshape(x.shape).nan_to_num(1.0)
    assert same_bits(body.relu_backward(grad), codec.relu_backward(codec.encode(x), grad))


@pytest.mark.parametrize("name", EXACT + SCALED)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("n", [1, 1000, 1025, 70_000])
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
