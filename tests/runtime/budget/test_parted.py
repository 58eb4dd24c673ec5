"""A sparse payload on the host whose parts come back for each use: the codec's own results, and what they take; what
scratch and packing take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.codecs import CODECS, Sparse
from gistkit.errors import GistError
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


def test_only_a_scratch_is_cut_into_parts():
    codec, x = CODECS["zvc"], torch.relu(torch.randn(20_000))
    capacity = codec.capacity(x.numel(), 0.1)
    spill = torch.empty(codec.spill_bytes(x.numel(), x.dtype, capacity) + 512, dtype=torch.uint8)
    spill = spill[-spill.data_ptr() % 512 :]
    spilled = codec.begin_within(x, capacity, spill)
    with pytest.raises(GistError, match=r"must be a scratch, whose slots can be cut, got .* with a spill; send what"):
        PartedBody(codec, spilled, CPU, 10**6)
    with pytest.raises(GistError, match=r"must be a scratch, whose slots can be cut, got Encoded\(zvc, \(20000,\)"):
        PartedBody(codec, codec.encode(x), CPU, 10**6)


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


@pytest.mark.parametrize("name", SCALED)
def test_scaled_formats_stay_within_their_bound(name):
    x = torch.relu(torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)))
    body, codec = parted(name, x, 60_000), CODECS[name]
    # blocks begin anew with each part: whatever they are, none has a larger value than all of the tensor
    step = torch.ldexp(torch.tensor(codec.fmt.min_normal), torch.frexp(x.max()).exponent - codec.fmt.max_exponent)
    bound = torch.maximum(x.double() / 2, step.double() / 2) * 2.0**-codec.fmt.mantissa_bits
    assert ((body.dense().double() - x).abs() <= bound).all()
    assert torch.equal(body.relu_backward(torch.ones_like(x)), (x > 0).float())


@pytest.mark.parametrize("name", ["zvc", "csr", "zvc+fp10", "csr+fp8", "zvc+fp8s", "csr+fp10s"])
@pytest.mark.parametrize("within_bytes", [0, 12_000, 10**8])
def test_a_use_takes_no_more_than_it_says(name, within_bytes):
    x = torch.relu(torch.randn(20_000, generator=torch.Generator().manual_seed(0)))
    body, grad = parted(name, x, within_bytes), torch.ones_like(x)
    assert body.use_bytes <= within_bytes and body.nbytes == 0 and body.host_bytes >= x.numel()
    for use in (body.dense, lambda: body.relu_backward(grad)):
        with LiveBytes() as live:
            made = use()
        assert x.nbytes <= live.peak_bytes <= made.nbytes + body.use_bytes


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
