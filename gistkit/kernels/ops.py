"""The operators ``gistkit::*``: schemas and shapes. docs/kernels.md says what each computes.

Flat, contiguous 1-D tensors in storage order, except for the pool operators (4-D, NCHW or channels_last). No operator
synchronises with the host, but for the first ReLU of a device (:mod:`gistkit.kernels.signed_zero`).

One schema, three implementations: ``CPU`` is the oracle in :mod:`gistkit.kernels.reference`, ``CUDA`` the Triton
launcher, fake tensors get shapes. Arguments are not checked: codecs and nn pass what fits together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import torch

from gistkit import formats
from gistkit.kernels.layout import STRIDES, code_count, code_dtype, is_channels_last, maps_like, unit_dtype, value_dtype

LIBRARY = torch.library.Library("gistkit", "DEF")
_LAUNCHERS = {
    "mask": "mask.mask",
    "narrow": "narrow.narrow",
    "integers": "narrow.integers",
    "sparse": "sparse.operators",
    "zvc": "sparse.zvc_launches",
    "lane": "sparse.lane",
    "pool": "pool.operators",
    "rebuild": "rebuild.rebuild",
}


@cache
def launchers(family: str) -> ModuleType:
    """The module of a family's CUDA launchers. They import Triton, so each is imported at its first call."""
    return importlib.import_module(f"gistkit.kernels.{_LAUNCHERS[family]}")


@cache
def _oracles(family: str) -> ModuleType:
    return importlib.import_module(f"gistkit.kernels.reference.{family}")


def operator(family: str, schema: str) -> Callable[[Callable | None], Callable]:
    """Define ``gistkit::name`` from its schema; the decorated function is its fake implementation. None in its place:
    for CPU tensors alone, as sizes depend on values, without a launcher. Returns the callable operator overload."""
    name = schema[: schema.index("(")]

    def implementation(module: Callable[[str], ModuleType], *args, **kwargs):
        return getattr(module(family), name)(*args, **kwargs)

    def bind(fake: Callable | None) -> Callable:
        LIBRARY.define(schema)
        LIBRARY.impl(name, partial(implementation, _oracles), "CPU")
        if fake is not None:
            LIBRARY.impl(name, partial(implementation, launchers), "CUDA")
            torch.library.register_fake(f"gistkit::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.gistkit, name).default

    return bind


def _nothing(*_, **__) -> None:
    return None


def _like_first(x, *_):
    return torch.empty_like(x)


def _mask_of(x):
    return x.new_empty((formats.mask1_bytes(x.numel()),), dtype=torch.uint8)


mask1_encode = operator("mask", "mask1_encode(Tensor x) -> Tensor")(_mask_of)
relu_mask1 = operator("mask", "relu_mask1(Tensor x) -> (Tensor, Tensor)")(lambda x: (torch.empty_like(x), _mask_of(x)))
relu_mask1_ = operator("mask", "relu_mask1_(Tensor(a!) x) -> Tensor")(_mask_of)
mask1_backward = operator("mask", "mask1_backward(Tensor grad, Tensor mask) -> Tensor")(_like_first)
mask1_backward_ = operator("mask", "mask1_backward_(Tensor(a!) grad, Tensor mask) -> ()")(_nothing)
bits_encode = operator("mask", "bits_encode(Tensor b) -> Tensor")(_mask_of)
bits_decode = operator("mask", "bits_decode(Tensor mask, int n) -> Tensor")(
    lambda mask, n: mask.new_empty((n,), dtype=torch.bool)
)
dropout_backward = operator("mask", "dropout_backward(Tensor grad, Tensor mask, float scale) -> Tensor")(_like_first)


@operator("narrow", "narrow_encode(Tensor x, str fmt, str scaling) -> (Tensor, Tensor)")
def narrow_encode(x, fmt, scaling):
    codes = x.new_empty((code_count(fmt, x.numel()),), dtype=code_dtype(fmt))
    return codes, x.new_empty((formats.scale_count(x.numel(), scaling),), dtype=torch.uint8)


@operator(
    "narrow", "narrow_decode(Tensor codes, Tensor exponents, int n, ScalarType dtype, str fmt, str scaling) -> Tensor"
)
def narrow_decode(codes, exponents, n, dtype, fmt, scaling):
    return codes.new_empty((n,), dtype=dtype)


@operator("narrow", "fp10_pack(Tensor codes) -> Tensor")
def fp10_pack(codes):
    return codes.new_empty((formats.fp10_words(codes.numel()),), dtype=torch.int32)


@operator("integers", "int_encode(Tensor x, int bits, int seed) -> (Tensor, Tensor, Tensor)")
def int_encode(x, bits, seed):
    blocks = formats.ceil_div(x.numel(), formats.INT_BLOCK)
    lows, steps = (x.new_empty((blocks,), dtype=torch.float32) for _ in range(2))
    return x.new_empty((blocks * formats.INT_UNITS,), dtype=unit_dtype(bits)), lows, steps


@operator(
    "integers", "int_decode(Tensor units, Tensor lows, Tensor steps, int n, ScalarType dtype, int bits) -> Tensor"
)
def int_decode(units, lows, steps, n, dtype, bits):
    return units.new_empty((n,), dtype=dtype)


_PAYLOAD = "Tensor index, Tensor counts, Tensor values, Tensor exponents"
_FORM = "str fmt, str scaling, bool packed, Tensor? spill=None"
_DECODE = f"({_PAYLOAD}, int n, ScalarType dtype, {_FORM}) -> Tensor"
_RELU_BACKWARD = f"(Tensor grad, {_PAYLOAD}, Tensor(a!) out, {_FORM}) -> ()"


def sparse_arrays(layout: str, x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(index, counts, values) of a scratch for x in ``layout``, zvc or csr; values in ``fmt``."""
    stride = STRIDES[layout]
    slots = formats.ceil_div(x.numel(), stride)
    items, dtype = (formats.ZVC_WORDS, torch.int32) if layout == "zvc" else (stride, torch.uint8)
    index = x.new_empty((slots * items,), dtype=dtype)
    counts = x.new_empty((slots,), dtype=torch.int16)
    return index, counts, x.new_empty((slots * stride,), dtype=value_dtype(fmt, x.dtype))


def _encoder(name: str, fake: Callable | None) -> Callable:
    return operator("sparse", f"{name}(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")(fake)


zvc_encode, csr_encode = (_encoder(f"{layout}_encode", partial(sparse_arrays, layout)) for layout in STRIDES)
zvc_pack, csr_pack = (_encoder(f"{layout}_pack", None) for layout in STRIDES)


@operator("sparse", "compact(Tensor scratch, Tensor counts, int stride, int total, Tensor(a!)? spill=None) -> Tensor")
def compact(scratch, counts, stride, total, spill=None):
    return scratch.new_empty((total,))


@operator(
    "sparse",
    "csr_compact(Tensor columns, Tensor values, Tensor counts, int total, Tensor(a!)? spill=None) -> (Tensor, Tensor)",
)
def csr_compact(columns, values, counts, total, spill=None):
    return columns.new_empty((total,)), values.new_empty((total,))


# Packed items at a place that the device alone knows; ``lane`` may be pinned host memory (kernels.sparse.lane).
ship = operator(
    "lane",
    "ship(Tensor scratch, Tensor index, Tensor counts, int stride, Tensor(a!) lane, Tensor begin, "
    "Tensor(b!) after, Tensor(c!) place) -> ()",
)(_nothing)
unship = operator(
    "lane", "unship(Tensor lane, Tensor place, Tensor(a!) known, Tensor(b!) values, Tensor(c!)? columns) -> ()"
)(_nothing)


def _decoded(index, counts, values, exponents, n, dtype, fmt, scaling, packed, spill=None):
    return values.new_empty((n,), dtype=dtype)


zvc_decode = operator("sparse", f"zvc_decode{_DECODE}")(_decoded)
csr_decode = operator("sparse", f"csr_decode{_DECODE}")(_decoded)
zvc_relu_backward = operator("sparse", f"zvc_relu_backward{_RELU_BACKWARD}")(_nothing)
csr_relu_backward = operator("sparse", f"csr_relu_backward{_RELU_BACKWARD}")(_nothing)


bn_rebuild = operator(
    "rebuild",
    "bn_rebuild(Tensor x, Tensor[] norm, str form, int plane, Tensor? other, Tensor[] other_norm, str other_form, "
    "bool relu, Tensor(a!) out) -> ()",
)(_nothing)


def pool_size(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Outputs of a pool along one dimension (the last window starts inside the input or its left pad)."""
    out = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    return out


@operator(
    "pool",
    "maxpool_forward(Tensor x, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, bool relu, "
    "bool zero_code, int bits) -> (Tensor, Tensor)",
)
def maxpool_forward(x, kernel, stride, padding, ceil_mode, relu, zero_code, bits):
    sizes = (pool_size(x.shape[2 + i], kernel[i], stride[i], padding[i], ceil_mode) for i in range(2))
    y = maps_like(x, *sizes, is_channels_last(x))
    return y, x.new_empty((formats.argmax_bytes(y.numel(), bits),), dtype=torch.uint8)


@operator(
    "pool",
    "maxpool_backward(Tensor grad_y, Tensor codes, int height, int width, int[2] kernel, int[2] stride, "
    "int[2] padding, bool channels_last, bool zero_code, int bits) -> Tensor",
)
def maxpool_backward(grad_y, codes, height, width, kernel, stride, padding, channels_last, zero_code, bits):
    return maps_like(grad_y, height, width, channels_last)
