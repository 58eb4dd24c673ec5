"""Codecs and delayed exact packing on a CUDA device, against the same codecs on CPU tensors."""

import pytest
import torch

from gistkit.codecs import CODECS, Sparse
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from tests.gpu.waiting import no_synchronisation
from tests.support.tensors import FLOATS, plain_nan, same_bits, values_of

FIXED = {"bits": torch.bool, "argmax4": torch.uint8, "argmax8": torch.uint8}
SPARSE = [name for name, c in CODECS.items() if isinstance(c, Sparse)]
CASES = [(name, dtype) for name in CODECS for dtype in ((FIXED[name],) if name in FIXED else FLOATS)]
RELU = [(name, dtype) for name, dtype in CASES if name not in FIXED and CODECS[name].form.signs]
SLEEP_CYCLES = 300_000_000  # about 0.15 s at 2 GHz


def host_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values with everything planted but NaN, whose sign and payload PyTorch's CPU conversions rewrite."""
    n = int(torch.tensor(shape).prod())
    x = values_of(n, dtype, seed, 0.6, False).view(shape)
    return torch.where(x.isnan(), 1.0, x) if dtype in FLOATS else x


@pytest.mark.parametrize("name, dtype", CASES)
@pytest.mark.parametrize("shape", [(0,), (1,), (1_000_003,), (3, 17, 61, 67)])
def test_the_device_makes_the_payload_that_the_oracle_makes(name, dtype, shape):
    x = host_values(shape, dtype)
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    expected = CODECS[name].encode(x)
    packer = ExactPacker()
    encoded = packer.encode(CODECS[name], x.cuda())
    early = CODECS[name].decode(encoded)
    torch.cuda.synchronize()
    packer.poll()
    assert not encoded.pending and encoded.nonzeros == expected.nonzeros
    for got, want in zip(encoded.payload, expected.payload, strict=True):
        assert same_bits(got.cpu(), want)
    late = CODECS[name].decode(encoded)
    want = CODECS[name].decode(expected)
    assert same_bits(early.cpu(), want) and same_bits(late.cpu(), want)
    assert early.stride() == late.stride() == x.stride()
    assert 0 <= encoded.nbytes - expected.nbytes <= 7 * (4 + 1)  # values and csr's columns end at 8 items


@pytest.mark.parametrize("name, dtype", CASES)
def test_nan_stays_nan_and_other_layouts_come_back(name, dtype):
    x = values_of(60_000, dtype, 2, 0.5, False).view(100, 20, 30).cuda()
    for view in (x.transpose(0, 2), x[:, ::2], x[:1].expand(4, 20, 30)):
        decoded = CODECS[name].decode(CODECS[name].encode(view))
        expected = CODECS[name].decode(CODECS[name].encode(view.cpu()))
        assert same_bits(plain_nan(decoded.cpu()), plain_nan(expected))


@pytest.mark.parametrize("name, dtype", RELU)
def test_relu_backward_is_threshold_backward(name, dtype):
    y = torch.relu(values_of(4 * 33 * 57 * 61, dtype, 4, 0.2, False).view(4, 33, 57, 61).cuda())
    y = y.to(memory_format=torch.channels_last)
    packer = ExactPacker()
    encoded = packer.encode(CODECS[name], y)
    for grad in (
        torch.randn_like(y),
        torch.randn(y.shape, device="cuda").to(dtype),
        torch.ones_like(y[:1]).expand_as(y),
    ):
        want = torch.ops.aten.threshold_backward(grad, y, 0)
        got = CODECS[name].relu_backward(encoded, grad)
        assert same_bits(got, want) and got.stride() == y.stride()
        torch.cuda.synchronize()
        packer.poll()
    assert not encoded.pending


@pytest.mark.parametrize("name", SPARSE)
def test_the_host_never_waits(name):
    packer = ExactPacker()
    x = host_values((300_000,), torch.float32).cuda()
    grad = torch.randn_like(x)
    CODECS[name].decode(packer.encode(CODECS[name], x))  # compiles the kernels, allocates the pinned slots
    CODECS[name].relu_backward(packer.encode(CODECS[name], x), grad)
    torch.cuda.synchronize()
    packer.poll()
    with no_synchronisation():
        torch.cuda._sleep(SLEEP_CYCLES)
        held = [packer.encode(CODECS[name], x) for _ in range(5)]
        assert packer.poll() == 0 and all(e.pending for e in held)
        early = [CODECS[name].decode(e) for e in held]
        CODECS[name].relu_backward(held[0], grad)
    torch.cuda.synchronize()
    with no_synchronisation():
        assert packer.poll() == 5
        late = [CODECS[name].decode(e) for e in held]
    assert all(same_bits(a, b) for a, b in zip(early, late, strict=True))


def test_an_encoding_is_settled_on_its_own_stream_only():
    packer = ExactPacker()
    x = host_values((300_000,), torch.float32).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        encoded = packer.encode(CODECS["zvc"], x)
    torch.cuda.synchronize()
    assert packer.poll() == 0 and encoded.pending
    with torch.cuda.stream(side):
        assert packer.poll() == 1
    torch.cuda.synchronize()
    assert same_bits(CODECS["zvc"].decode(encoded), x)


def test_settling_gives_the_scratch_back():
    packer = ExactPacker()
    x = torch.relu(torch.randn(1 << 22, device="cuda"))
    packer.encode(CODECS["zvc"], x)
    torch.cuda.synchronize()
    packer.poll()
    before = torch.cuda.memory_allocated()
    encoded = packer.encode(CODECS["zvc"], x)
    assert torch.cuda.memory_allocated() - before >= x.nbytes
    torch.cuda.synchronize()
    packer.poll()
    held = torch.cuda.memory_allocated() - before
    # the allocator leaves up to 1 MiB unsplit after the one large block (values) and rounds the others to 512 bytes
    assert encoded.nbytes <= held <= encoded.nbytes + 2**20 + 3 * 512
