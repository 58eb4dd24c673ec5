"""gistkit.functional against PyTorch's on CUDA; pools, which CUDA adds up in any order, against the CPU's."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gistkit import functional
from gistkit.nn.norm import rebuild_candidates
from tests.gpu.waiting import no_synchronisation
from tests.support.nn_cases import DTYPES, assert_same, laid_out, planted, run, same_bits

LAYOUTS = ("contiguous", "channels_last")
_assert_same = partial(assert_same, special=False, device="cuda")


def _leaf(shape, dtype=torch.float32, layout="contiguous", special=False):
    return laid_out(planted(shape, dtype, special), layout).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(8, 32, 56, 56), (3, 5, 7, 11), (1, 1, 1, 1)])
@pytest.mark.parametrize("inplace", [False, True])
def test_relu_and_dropout(dtype, layout, shape, inplace):
    x = _leaf(shape, dtype, layout, special=True)
    relu = [lambda t, f=f: f(t * 1, inplace) for f in (functional.relu, F.relu)]
    dropout = [lambda t, f=f: f(t * 1, 0.3, True, inplace) for f in (functional.dropout, F.dropout)]
    for own, plain in (relu, dropout):
        # PyTorch's CUDA kernels may rewrite the payload of a NaN
        _assert_same(own, plain, [x], special=True, nan_payloads=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("windows", [(2,), (3, 2, 1), (3, 2, 1, 1, True), (3, 1, 1, 2), (5, 3, 2)])
def test_pools(dtype, layout, windows):
    x = _leaf((4, 16, 57, 43), dtype, layout)
    rectified = lambda t: F.max_pool2d(F.relu(t), *windows)  # noqa: E731
    for own, plain in (
        (lambda t: functional.max_pool2d(t, *windows), lambda t: F.max_pool2d(t, *windows)),
        (lambda t: functional.relu_max_pool2d(t, *windows), rectified),
        (
            lambda t: functional.max_pool2d(functional.relu(t, mask_in_pool=True), *windows, mask_in_pool=True),
            rectified,
        ),
    ):
        y, grad_x, _ = run(own, [x], special=False, device="cuda")
        # on CUDA sums of bf16 and fp16 gradients are formed in fp32, in row-major order, and rounded once
        want, want_grad = _pool_oracle(plain, x)
        assert same_bits(y.cpu(), want) and same_bits(grad_x.cpu(), want_grad)


def _pool_oracle(plain, x):
    torch.manual_seed(11)
    wide = x.detach().float().requires_grad_()
    y = plain(wide)
    torch.manual_seed(12)
    (grad,) = torch.autograd.grad(y, wide, planted(y.shape, x.dtype, False).float())
    return y.detach().to(x.dtype), grad.to(x.dtype)


CONVOLUTIONS = {
    "3x3": ((8, 16, 24, 3), (1, 1, 1, 1)), "1x1": ((8, 16, 24, 1), (1, 0, 1, 1)),
    "strided": ((8, 3, 16, 7), (2, 3, 1, 1)), "dilated": ((4, 16, 16, 3), (1, 2, 2, 1)),
    "grouped": ((4, 16, 32, 3), (2, 1, 1, 4)),
    "depthwise": ((4, 16, 16, 3), (1, 1, 1, 16)), "same": ((4, 8, 8, 4), (1, "same", 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_conv2d(case, dtype, layout, weight_layout, cudnn):
    (n, c, o, k), where = CONVOLUTIONS[case]
    operands = [
        _leaf((n, c, 28, 30), dtype, layout),
        _leaf((o, c // where[-1], k, k), dtype, weight_layout),
        _leaf((o,), dtype),
    ]
    with torch.backends.cudnn.flags(enabled=cudnn, benchmark=False, deterministic=True):
        _assert_same(lambda *t: functional.conv2d(*t, *where), lambda *t: F.conv2d(*t, *where), operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 64), (4, 17, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, shape, bias):
    operands = [_leaf(shape, dtype), _leaf((40, 64), dtype), _leaf((40,), dtype) if bias else None]
    _assert_same(functional.linear, F.linear, operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cudnn", [True, False])
def test_batch_norm_and_its_rebuild(dtype, layout, cudnn):
    operands = [_leaf((8, 24, 28, 30), dtype, layout), _leaf((24,)), _leaf((24,))]
    with torch.backends.cudnn.flags(enabled=cudnn):
        calls = [
            lambda *t, f=f: f(t[0], None, None, *t[1:], training=True) for f in (functional.batch_norm, F.batch_norm)
        ]
        _assert_same(*calls, operands)
        x, weight, bias = (t.detach().cuda() for t in operands)
        y = functional.batch_norm(x.requires_grad_(), None, None, weight, bias, training=True)
        stats, y = (y.grad_fn._saved_result1, y.grad_fn._saved_result2), y.detach()
        matching = [f for f in rebuild_candidates(x) if same_bits(f(x.detach(), *stats, weight, bias), y)]
    # cuDNN's arithmetic is not documented; PyTorch's own kernel must be reproduced
    assert matching or (cudnn and dtype != torch.bfloat16), matching


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:max_pool2d_with_indices_backward_cuda does not have a deterministic:UserWarning")
def test_autocast(dtype):
    def network(f, x, kernel, scale, shift, matrix):
        with torch.autocast("cuda", dtype):
            y = f.conv2d(x, kernel, None, 1, 1)
            y = f.max_pool2d(f.relu(f.batch_norm(y, None, None, scale, shift, True), True), 2)
            return f.linear(f.dropout(y.flatten(1)), matrix)

    operands = [_leaf(s) for s in ((4, 3, 8, 8), (4, 3, 3, 3), (4,), (4,), (5, 64))]
    _assert_same(*(lambda *t, f=f: network(f, *t) for f in (functional, F)), operands)


def test_uses_of_one_weight_are_added_as_pytorch_adds_them():
    x = torch.randn(4, 8, 9, 9, device="cuda", requires_grad=True)
    weight = torch.randn(8, 8, 1, 1, device="cuda", requires_grad=True)
    found = []
    for f in (functional, F):
        with torch.autocast("cuda", torch.bfloat16), no_synchronisation():
            y = f.conv2d(F.conv2d(f.conv2d(x, weight), weight), weight)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), (x, weight))))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
