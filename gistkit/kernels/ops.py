"""The operators ``gistkit::*``: schemas and shapes. docs/kernels.md says what each computes.

Flat, contiguous 1-D tensors in storage order, except for the pool operators (4-D, NCHW or channels_last). No operator
synchronises with the host, but for the first ReLU of a device (:mod:`gistkit.kernels.signed_zero`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gistkit import formats
from gistkit.kernels.launch.checks import code_count, code_dtype
from gistkit.kernels.launch.library import operator
from gistkit.kernels.layout import is_channels_last
from gistkit.kernels.sparse.arguments import value_dtype


def _backward(family: str, name: str, rest: str) -> tuple[Callable, Callable]:
    """``name(grad, ...)``, which gives the input's gradient, and ``name_``, which overwrites the output's with it."""
    new = operator(family, f"{name}(Tensor grad, {rest}) -> Tensor")(lambda grad, *_: torch.empty_like(grad))
    inplace = operator(family, f"{name}_(Tensor(a!) grad, {rest}) -> ()")(lambda *_: None)
    return new, inplace


# --- masks -----------------------------------------------------------------------------------------------------------


@operator("mask", "mask1_encode(Tensor x) -> Tensor")
def mask1_encode(x):
    return x.new_empty((formats.mask1_bytes(x.numel()),), dtype=torch.uint8)


@operator("mask", "relu_mask1(Tensor x) -> (Tensor, Tensor)")
def relu_mask1(x):
    return torch.empty_like(x), x.new_empty((formats.mask1_bytes(x.numel()),), dtype=torch.uint8)


@operator("mask", "relu_mask1_(Tensor(a!) x) -> Tensor")
def relu_mask1_(x):
    return x.new_empty((formats.mask1_bytes(x.numel()),), dtype=torch.uint8)


mask1_backward, mask1_backward_ = _backward("mask", "mask1_backward", "Tensor mask")


@operator("mask", "bits_encode(Tensor b) -> Tensor")
def bits_encode(b):
    return b.new_empty((formats.mask1_bytes(b.numel()),), dtype=torch.uint8)


@operator("mask", "bits_decode(Tensor mask, int n) -> Tensor")
def bits_decode(mask, n):
    return mask.new_empty((n,), dtype=torch.bool)


dropout_backward, dropout_backward_ = _backward("mask", "dropout_backward", "Tensor mask, float scale")


# --- narrow floats ---------------------------------------------------------------------------------------------------


@operator("narrow", "narrow_encode(Tensor x, str fmt, str scaling) -> (Tensor, Tensor)")
def narrow_encode(x, fmt, scaling):
    codes = x.new_empty((code_count(fmt, x.numel()),), dtype=code_dtype(fmt))
    return codes, x.new_empty((formats.scale_count(x.numel(), scaling),), dtype=torch.uint8)


@operator(
    "narrow",
    "narrow_decode(Tensor codes, Tensor exponents, int n, ScalarType dtype, str fmt, str scaling) -> Tensor",
)
def narrow_decode(codes, exponents, n, dtype, fmt, scaling):
    return codes.new_empty((n,), dtype=dtype)


@operator("narrow", "fp10_pack(Tensor codes) -> Tensor")
def fp10_pack(codes):
    return codes.new_empty((formats.fp10_words(codes.numel()),), dtype=torch.int32)


# --- sparse storage --------------------------------------------------------------------------------------------------


_PAYLOAD = "Tensor index, Tensor counts, Tensor values, Tensor exponents"
_FORM = "str fmt, str scaling, bool packed, Tensor? spill=None"
_DECODE = f"({_PAYLOAD}, int first, int n, ScalarType dtype, {_FORM}) -> Tensor"
_RELU_BACKWARD = f"(Tensor grad, {_PAYLOAD}, Tensor(a!) out, {_FORM}) -> ()"


def _sparse(x: torch.Tensor, fmt: str, stride: int, index_items: int, index_dtype: torch.dtype):
    slots = formats.ceil_div(x.numel(), stride)
    index = x.new_empty((slots * index_items,), dtype=index_dtype)
    counts = x.new_empty((slots,), dtype=torch.int16)
    return index, counts, x.new_empty((slots * stride,), dtype=value_dtype(fmt, x.dtype))


@operator("sparse", "zvc_encode(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")
def zvc_encode(x, fmt):
    return _sparse(x, fmt, formats.ZVC_SLOT, formats.ZVC_WORDS, torch.int32)


@operator("sparse", "csr_encode(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")
def csr_encode(x, fmt):
    return _sparse(x, fmt, formats.CSR_COLUMNS, formats.CSR_COLUMNS, torch.uint8)


zvc_pack = operator("sparse", "zvc_pack(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")(None)
csr_pack = operator("sparse", "csr_pack(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")(None)


@operator("sparse", "compact(Tensor scratch, Tensor counts, int stride, int total, Tensor(a!)? spill=None) -> Tensor")
def compact(scratch, counts, stride, total, spill=None):
    return scratch.new_empty((total,))


@operator(
    "sparse",
    "csr_compact(Tensor columns, Tensor values, Tensor counts, int total, Tensor(a!)? spill=None) -> (Tensor, Tensor)",
)
def csr_compact(columns, values, counts, total, spill=None):
    return columns.new_empty((total,)), values.new_empty((total,))


def _decoded(index, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None):
    return values.new_empty((n,), dtype=dtype)


zvc_decode = operator("sparse", f"zvc_decode{_DECODE}")(_decoded)
csr_decode = operator("sparse", f"csr_decode{_DECODE}")(_decoded)
zvc_relu_backward = operator("sparse", f"zvc_relu_backward{_RELU_BACKWARD}")(lambda *_, **__: None)
csr_relu_backward = operator("sparse", f"csr_relu_backward{_RELU_BACKWARD}")(lambda *_, **__: None)


# --- rebuilds --------------------------------------------------------------------------------------------------------


@operator(
    "rebuild",
    "bn_rebuild(Tensor x, Tensor[] norm, str form, int plane, Tensor? other, Tensor[] other_norm, str other_form, "
    "bool relu, Tensor(a!) out) -> ()",
)
def bn_rebuild(x, norm, form, plane, other, other_norm, other_form, relu, out):
    return None


# --- max-pool --------------------------------------------------------------------------------------------------------


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
    n, c, h, w = x.shape
    oh = pool_size(h, kernel[0], stride[0], padding[0], ceil_mode)
    ow = pool_size(w, kernel[1], stride[1], padding[1], ceil_mode)
    memory_format = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    y = torch.empty((n, c, oh, ow), dtype=x.dtype, device=x.device, memory_format=memory_format)
    return y, x.new_empty((formats.argmax_bytes(n * c * oh * ow, bits),), dtype=torch.uint8)


@operator(
    "pool",
    "maxpool_backward(Tensor grad_y, Tensor codes, int height, int width, int[2] kernel, int[2] stride, "
    "int[2] padding, bool channels_last, bool zero_code, int bits) -> Tensor",
)
def maxpool_backward(grad_y, codes, height, width, kernel, stride, padding, channels_last, zero_code, bits):
    n, c = grad_y.shape[:2]
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    shape = (n, c, height, width)
    return torch.empty(shape, dtype=grad_y.dtype, device=grad_y.device, memory_format=memory_format)
