"""A launch that comes again with tensors of the same kind is the call that every launch of that kind makes."""

import pytest
import torch

from gistkit.kernels import ops
from gistkit.kernels.launch import direct, tiling
from gistkit.kernels.launch.repeated import Repeated, repeated_tiles
from gistkit.kernels.layout import flat
from gistkit.kernels.reference import mask as mask_reference
from gistkit.kernels.reference import rebuild as rebuild_reference
from gistkit.runtime.stash.verify import same_bits
from tests.kernels.test_launch import Kernel

X, Y = torch.empty(64), torch.empty(64)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel on device 0, which is the current one."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", _Device)
    return Kernel()


class _Device:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def repeated(kernel, device=0):
    return Repeated(kernel, 5, device, (48,), ROWS=256, ALIGNED=True)


def addresses(*tensors):
    return tuple(t.data_ptr() for t in tensors)


def test_it_makes_the_same_call(kernel):
    launch = repeated(kernel)
    assert not launch.at(*addresses(X, Y)) and not kernel.compiled, "nothing is known before the first"
    launch.first(X, Y)
    (compiled,) = kernel.compiled
    assert not compiled.calls and launch.at(*addresses(X, Y))
    tiling.launch_here(kernel, 5, 0, 4, (X, Y, 48), {"ROWS": 256, "ALIGNED": True})
    assert len(kernel.compiled) == 1 and compiled.calls[0] == compiled.calls[1]


def test_addresses_of_another_kind_go_the_usual_way(kernel):
    launch = repeated(kernel)
    launch.first(X[1:], Y)
    assert not launch.at(*addresses(X, Y)), "what was compiled for odd addresses serves no others"
    launch.first(X, Y)
    assert len(kernel.compiled) == 2 and launch.at(*addresses(X[4:], Y))
    assert not launch.at(*addresses(X[1:], Y)) and not launch.at(*addresses(X, Y[2:]))


def test_another_device_is_made_the_current_one(kernel, monkeypatch):
    launch = repeated(kernel, device=1)
    launch.first(X, Y)
    assert not launch.at(*addresses(X, Y))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert launch.at(*addresses(X, Y))


@pytest.mark.parametrize("n", [1, 8, 2048, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_those_of_a_launch_over_tiles(kernel, monkeypatch, n, dtype):
    x, seen = torch.empty(n, dtype=dtype), []
    monkeypatch.setattr(tiling, "launch", lambda *args, **options: seen.append((args, options)))
    tiling.launch_tiles(kernel, x, x)
    ((_, programs, _, _, *numbers), constants), launch = seen[0], repeated_tiles(kernel, x)
    assert (launch._programs, launch._numbers, launch._constexprs) == (programs, tuple(numbers), constants)


class Stub:
    """Stands for a launch: what it is asked to do is done by ``work``."""

    def __init__(self, work):
        self.work, self.known, self.seen = work, None, []

    def at(self, *given):
        self.seen.append(given)
        if self.known is None:
            return False
        self.work(*self.known)
        return True

    def first(self, *tensors):
        assert self.seen[-1] == addresses(*tensors), "both ways get the same tensors in the same order"
        self.work(*tensors)


def _relu(x, y, mask):
    values, bits = mask_reference.relu_mask1(x.reshape(-1).clone())
    y.copy_(values.view(x.shape))
    mask.copy_(bits)


def _select(grad, mask, out):
    out.copy_(mask_reference.mask1_backward(grad.reshape(-1), mask).view(grad.shape))


class Launchers:
    """Stands for the modules of launchers."""

    repeated_relu = staticmethod(lambda x: Stub(_relu))
    repeated_backward = staticmethod(lambda x: Stub(_select))
    relu_mask1_dense = staticmethod(lambda x: (torch.relu(x), mask_reference.mask1_encode(x.reshape(-1))))

    @staticmethod
    def repeated_rebuild(x, channels, form, plane, how):
        def work(x, mean, invstd, weight, bias, other, *there, out):
            args = (form, plane, other.reshape(-1), list(there), how) if how else (form, plane, None, [], "")
            args = args if how != "values" else (*args[:3], [], "")
            rebuild_reference.bn_rebuild(x.reshape(-1), [mean, invstd, weight, bias], *args, True, out.view(-1))

        return Stub(lambda *tensors: work(*tensors[:-1], out=tensors[-1]))

    @staticmethod
    def repeated_codes(x, fmt, scaling):
        def encode(x, *codes):
            for to, made in zip(codes, ops.narrow_encode(flat(x), fmt, scaling), strict=False):
                to.copy_(made)

        def decode(codes, *more):
            *exponents, x = more
            exponents = exponents[0] if exponents else codes.new_empty(0, dtype=torch.uint8)
            flat(x).copy_(ops.narrow_decode(codes, exponents, x.numel(), x.dtype, fmt, scaling))

        return Stub(encode), Stub(decode)

    @staticmethod
    def bn_rebuild_dense(x, *args):
        *args, out = (a.reshape(-1) if isinstance(a, torch.Tensor) else a for a in args)
        rebuild_reference.bn_rebuild(x.reshape(-1), *args, out)

    @staticmethod
    def relu_mask1_dense_(x):
        bits = mask_reference.mask1_encode(x.reshape(-1))
        torch.relu_(x)
        return bits


@pytest.mark.parametrize("as_cuda", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_masks(as_cuda, inplace, monkeypatch):
    if as_cuda:
        monkeypatch.setattr(direct, "_is_plain", lambda x: True)
        monkeypatch.setattr(direct, "_launchers", lambda family: Launchers)
    x, grad = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
    masks, want = direct.Masks(x), torch.where(x <= 0, 0.0, grad)
    for _ in range(3):
        y = x.clone()
        bits = masks.relu_(y) if inplace else None
        y, bits = masks.relu(x) if bits is None else (y, bits)
        assert same_bits(y, torch.relu(x)) and bits.numel() == -(-x.numel() // 8)
        assert same_bits(masks.backward(grad, bits), want)
    other = torch.empty_strided(x.shape, (105, 1, 21, 3)).copy_(grad)
    result = masks.backward(other, bits)
    assert same_bits(result, want) and result.stride() == x.stride()


@pytest.mark.parametrize("as_cuda", [False, True])
@pytest.mark.parametrize("scaling", ["none", "block"])
@pytest.mark.parametrize("fmt", ["fp8", "fp16"])
def test_narrows(as_cuda, fmt, scaling, monkeypatch):
    if as_cuda:
        monkeypatch.setattr(direct, "_is_plain", lambda x: True)
        monkeypatch.setattr(direct, "_launchers", lambda family: Launchers)
    kind = torch.empty_strided((2, 3, 5, 7), (105, 1, 21, 3))
    narrows = direct.Narrows(kind, fmt, scaling)
    for _ in range(3):
        x = torch.empty_like(kind).normal_()
        codes, exponents = narrows.encode(x)
        want = ops.narrow_encode(flat(x), fmt, scaling)
        assert torch.equal(codes, want[0]) and codes.dtype == want[0].dtype and torch.equal(exponents, want[1])
        back = narrows.decode(codes, exponents)
        assert back.stride() == x.stride() and back.shape == x.shape and back.dtype == x.dtype
        assert same_bits(flat(back), ops.narrow_decode(*want, x.numel(), x.dtype, fmt, scaling))


@pytest.mark.parametrize("as_cuda", [False, True])
@pytest.mark.parametrize("other_form", ["", "values", "centred"])
def test_rebuilds(as_cuda, other_form, monkeypatch):
    if as_cuda:
        monkeypatch.setattr(direct, "_is_plain", lambda x: True)
        monkeypatch.setattr(direct, "_launchers", lambda family: Launchers)
    rebuilds = direct.Rebuilds(35, "split", other_form)
    for _ in range(3):
        x, other = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
        own, there = ([torch.randn(3), torch.rand(3), torch.randn(3), torch.randn(3)] for _ in range(2))
        vectors, beside = there if other_form == "centred" else [], other if other_form else None
        want = torch.empty_like(x)
        form = "centred" if vectors else ""
        flat = None if beside is None else other.view(-1)
        rebuild_reference.bn_rebuild(x.view(-1), own, "split", 35, flat, vectors, form, True, want.view(-1))
        out = torch.full_like(x, float("nan"))
        assert rebuilds(x, own, beside, vectors, out) is out and same_bits(out, want)
