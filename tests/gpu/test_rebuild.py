"""The rebuild kernel on a CUDA device: against the oracle, PyTorch's operators there, and real batch norms."""

import pytest
import torch
import torch.nn.functional as F

from gistkit.kernels import ops
from gistkit.kernels.layout import FORMS, flat
from gistkit.kernels.reference import rebuild as reference
from gistkit.kernels.signed_zero import relu_keeps_negative_zero
from gistkit.nn import norm as bn
from gistkit.nn.norm import by_kernel, kernel_factors, plane_of
from gistkit.runtime.rebuild.arithmetic import Kind, arithmetics
from tests.gpu.waiting import no_synchronisation
from tests.support.rebuild_cases import SIZES, factors, operands
from tests.support.tensors import FLOATS, plain_nan, positive_zeros, same_bits

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
# ResNet-50's planes, whole and odd numbers of 16-byte accesses
PLANES = [(64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)]


@dtypes
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_kernel_equals_the_oracle(dtype, size, form):
    x, other, norm, second = operands(size, dtype, sum(size))
    for relu in (False, True):
        for more in ((None, [], ""), (other, [], ""), (other, second, "scaled")):
            want, out = torch.empty_like(x), torch.empty_like(x, device="cuda")
            reference.bn_rebuild(x, norm, form, size[2], *more, relu, want)
            if relu and not relu_keeps_negative_zero(out):
                positive_zeros(want)
            there = [None if more[0] is None else other.cuda(), [v.cuda() for v in more[1]], more[2]]
            ops.bn_rebuild(x.cuda(), [v.cuda() for v in norm], form, size[2], *there, relu, out)
            assert same_bits(plain_nan(out.cpu()), plain_nan(want))


def image(channels: int, size: int, dtype: torch.dtype, channels_last: bool, seed: int) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(4, channels, size, size, generator=g, device="cuda").to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def _factors(channels: int) -> list[torch.Tensor]:
    return kernel_factors(*(v.cuda() for v in factors(channels, 3)))


@dtypes
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("channels", "size"), PLANES)
def test_one_pass_has_the_bits_of_pytorchs_kernels(dtype, channels_last, channels, size):
    x, other = (image(channels, size, dtype, channels_last, seed) for seed in (1, 2))
    there = _factors(channels)
    mean, invstd, weight, bias = there
    want = torch.ops.aten.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
    assert same_bits(by_kernel("scaled", x, *there), want)
    y = torch.empty_like(x)
    args = (flat(other), [], "", True, flat(y))
    ops.bn_rebuild(flat(x), there, "scaled", plane_of(x.shape, x.stride()), *args)
    assert same_bits(y, torch.relu(want + other))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "size"), PLANES)
def test_a_form_matches_the_forward(dtype, channels_last, channels, size):
    x = image(channels, size, dtype, channels_last, 1)
    weight, bias = (torch.randn(channels, device="cuda") for _ in range(2))
    y, mean, invstd, _, _ = torch._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, True)
    assert same_bits(y, F.batch_norm(x, None, None, weight, bias, True))
    exact = arithmetics({}, Kind(tuple(x.shape), x.stride(), x.dtype, x.device, weight.dtype, 1e-5))
    assert exact and exact[0] in bn.KERNEL_CANDIDATES
    assert same_bits(exact[0](x, mean, invstd, weight, bias), y)


def test_the_host_never_waits():
    x = image(64, 14, torch.float32, False, 1)
    there = _factors(64)
    relu_keeps_negative_zero(x)
    by_kernel("scaled", x, *there)
    with no_synchronisation():
        by_kernel("scaled", x, *there)
        ops.bn_rebuild(flat(x), there, "scaled", 196, flat(x), [], "", True, torch.empty_like(flat(x)))


def test_more_than_two_to_the_31_elements():
    n = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 6 * n:
        pytest.skip("needs 13 GB of device memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-5:] = torch.arange(5, device="cuda")
    norm = [torch.full((2,), v, device="cuda") for v in (1.0, 2.0, 3.0, 3.0)]
    ops.bn_rebuild(x, norm, "scaled", 1024, None, [], "", True, x)
    assert x[:3].tolist() == [0.0] * 3 and x[-5:].tolist() == [0.0, 3.0, 9.0, 15.0, 21.0]
