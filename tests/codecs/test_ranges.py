"""Decoding a part gives the same bits as decoding all and cutting, for every codec; and reads no more than it must."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gistkit
from gistkit.codecs import CODECS, Sparse
from gistkit.kernels.layout import flat
from gistkit.nn.keep import keep_coded
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.stash.stash import CodedBody, Reader, Stash
from gistkit.runtime.stash.verify import same_bits

FLOAT_CODECS = sorted(name for name, codec in CODECS.items() if codec.dtypes and torch.float32 in codec.dtypes)
LENGTHS = [0, 1, 255, 1023, 1024, 1025, 5000]


def values(n, dtype, seed=0):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x[x < 0.3] = 0
    x[::7] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FLOAT_CODECS)
def test_a_part_is_the_cut_of_the_whole(name, dtype):
    @given(st.sampled_from(LENGTHS), st.data())
    def law(n, data):
        start = data.draw(st.integers(0, n))
        stop = data.draw(st.integers(start, n))
        encoded = CODECS[name].encode(values(n, dtype))
        whole = flat(CODECS[name].decode(encoded))
        assert same_bits(CODECS[name].decode_range(encoded, start, stop), whole[start:stop])

    law()


@pytest.mark.parametrize("name", [n for n in FLOAT_CODECS if isinstance(CODECS[n], Sparse)])
def test_a_part_of_a_pending_encoding(name):
    codec = CODECS[name]
    encoded = codec.begin(values(5000, torch.float32))
    whole = flat(codec.decode(encoded))
    assert encoded.pending == (codec.scaling == "none")  # a scaled one is settled on the way
    assert same_bits(codec.decode_range(encoded, 1500, 4097), whole[1500:4097])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("codec", ["zvc", "csr", "fp8s", "fp16"])
def test_rows_of_a_stash(codec, layout):
    x = values(6 * 4 * 5 * 5, torch.float32).view(6, 4, 5, 5).contiguous(memory_format=layout)
    stash = Stash(CodedBody(CODECS[codec].encode(x)), -1, codec, x.numel() * 4)
    whole = Reader(stash, x).dense()
    assert same_bits(Reader(stash, x).dense_rows(2, 5), whole[2:5])
    assert Reader(stash, x).dense_rows(2, 5).stride() == whole[2:5].stride()
    folded = x.permute(1, 0, 2, 3)  # its first dimension is not the outermost in memory
    assert same_bits(Reader(stash, folded).dense_rows(1, 3), whole.permute(1, 0, 2, 3)[1:3])


def two_convolutions():
    torch.manual_seed(0)
    first, last = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
    return nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), last)


def order_bound(x, grad, shape):
    """How much two orders of summing the elements of a 3x3 weight gradient can differ, per element.

    Each is a sum of n products. Either order is off by at most n eps times the sum of the products' magnitudes (Higham,
    Accuracy and Stability of Numerical Algorithms, eq. 4.4), so two orders differ by at most twice that.
    """
    magnitudes = torch.nn.grad.conv2d_weight(x.double().abs(), shape, grad.double().abs(), padding=1)
    return 2 * grad[:, 0].numel() * torch.finfo(torch.float32).eps * magnitudes


def test_reassociated_weight_gradients_stay_within_the_bound_of_another_order():
    x, grad = torch.randn(16, 16, 32, 32), torch.randn(16, 16, 32, 32)
    models = [gistkit.compress(two_convolutions(), fidelity=f) for f in ("bitwise", "reassociated")]
    for model in models:
        model(x).backward(grad)
    exact, sliced = (m[3].weight.grad for m in models)
    inputs = two_convolutions()[:3](x).detach()
    assert ((exact - sliced).abs() <= order_bound(inputs, grad, exact.shape)).all()
    assert not torch.equal(exact, sliced)


@pytest.mark.parametrize("codec", ["zvc", "csr", "fp8s"])
def test_batch_slices_decode_a_slice_at_a_time(codec):
    x, grad = torch.relu(torch.randn(16, 16, 32, 32)), torch.randn(16, 16, 32, 32)
    weight, peaks, found = torch.randn(16, 16, 3, 3, requires_grad=True), [], []
    for slices in (1, 8):
        y = gistkit.functional.conv2d(x, weight, padding=1, keep=keep_coded(codec), weight_grad_slices=slices)
        with LiveBytes() as live:
            found.append(torch.autograd.grad(y, weight, grad)[0])
        peaks.append(live.peak_bytes)
    assert ((found[0] - found[1]).abs() <= order_bound(x, grad, weight.shape)).all()
    dense, weights = x.numel() * 4, weight.numel() * 4
    assert peaks[0] >= dense
    # the slice at hand and the one before it; a few weight gradients: a part's, the running sum, its final copy
    assert peaks[1] <= 2 * dense // 8 + 4 * weights
