"""The operators ``gistkit::*``: schemas and shapes. docs/kernels.md says what each computes.

Flat, contiguous 1-D tensors in storage order, except for the pool operators (4-D, NCHW or channels_last). No operator
synchronises with the host, but for the first ReLU of a device (:mod:`gistkit.kernels.signed_zero`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gistkit import formats
from gistkit.kernels.launch.library import host_operator, operator
from gistkit.kernels.layout import is_channels_last

VALUE_DTYPES = {"fp16": torch.int16, "fp10": torch.int16, "fp8": torch.uint8}
CODE_DTYPES = {"fp16": torch.int16, "fp10": torch.int32, "fp8": torch.uint8}


def value_dtype(fmt: str, raw: torch.dtype) -> torch.dtype:
    """Dtype of the values that a sparse encode writes for a format of ``raw``, ``fp16``, ``fp10``, ``fp8``."""
    return raw if fmt == "raw" else VALUE_DTYPES[fmt]


def _backward(family: str, name: str, rest: str) -> tuple[Callable, Callable]:
    """``name(grad, ...)``, which gives the input's gradient, and ``name_``, which overwrites the output's with it."""
    new = operator(family, f"{name}(Tensor grad, {rest}) -> Tensor")(lambda grad, *_: torch.empty_like(grad))
    inplace = operator(family, f"{name}_(Tensor(a!) grad, {rest}) -> ()")(lambda *_: None)
    return new, inplace


# --- masks -----------------------------------------------------------------------------------------------------------


@operator("mask", "mask1_encode(Tensor x) -> Tensor")
def mask1_encode(x):
    return x.new_empty((formats.mask1_bytes(x.numel()),), dtype=torch.uint8)


@operator("mask", "mask1_decode(Tensor mask, int n, ScalarType dtype) -> Tensor")
def mask1_decode(mask, n, dtype):
    return mask.new_empty((n,), dtype=dtype)


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


def _narrow(x, fmt, scaling):
    n = x.numel()
    length = formats.fp10_words(n) if fmt == "fp10" else n
    codes = x.new_empty((length,), dtype=CODE_DTYPES[fmt])
    return codes, x.new_empty((formats.scale_count(n, scaling),), dtype=torch.uint8)


@operator("narrow", "fp16_encode(Tensor x, str scaling) -> (Tensor, Tensor)")
def fp16_encode(x, scaling):
    return _narrow(x, "fp16", scaling)


@operator("narrow", "fp10_encode(Tensor x, str scaling) -> (Tensor, Tensor)")
def fp10_encode(x, scaling):
    return _narrow(x, "fp10", scaling)


@operator("narrow", "fp8_encode(Tensor x, str scaling) -> (Tensor, Tensor)")
def fp8_encode(x, scaling):
    return _narrow(x, "fp8", scaling)


@operator("narrow", "fp16_decode(Tensor codes, Tensor exponents, int n, ScalarType dtype, str scaling) -> Tensor")
def fp16_decode(codes, exponents, n, dtype, scaling):
    return codes.new_empty((n,), dtype=dtype)


@operator("narrow", "fp10_decode(Tensor codes, Tensor exponents, int n, ScalarType dtype, str scaling) -> Tensor")
def fp10_decode(codes, exponents, n, dtype, scaling):
    return codes.new_empty((n,), dtype=dtype)


@operator("narrow", "fp8_decode(Tensor codes, Tensor exponents, int n, ScalarType dtype, str scaling) -> Tensor")
def fp8_decode(codes, exponents, n, dtype, scaling):
    return codes.new_empty((n,), dtype=dtype)


@operator("narrow", "fp10_pack(Tensor codes) -> Tensor")
def fp10_pack(codes):
    return codes.new_empty((formats.fp10_words(codes.numel()),), dtype=torch.int32)


# --- sparse storage --------------------------------------------------------------------------------------------------


@operator("sparse", "zvc_encode(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")
def zvc_encode(x, fmt):
    slots = formats.ceil_div(x.numel(), formats.ZVC_SLOT)
    words = x.new_empty((slots * formats.ZVC_WORDS,), dtype=torch.int32)
    counts = x.new_empty((slots,), dtype=torch.int16)
    return words, counts, x.new_empty((slots * formats.ZVC_SLOT,), dtype=value_dtype(fmt, x.dtype))


zvc_pack = host_operator("sparse", "zvc_pack(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")
csr_pack = host_operator("sparse", "csr_pack(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")


@operator("sparse", "csr_encode(Tensor x, str fmt) -> (Tensor, Tensor, Tensor)")
def csr_encode(x, fmt):
    rows = formats.ceil_div(x.numel(), formats.CSR_COLUMNS)
    counts = x.new_empty((rows,), dtype=torch.int16)
    columns = x.new_empty((rows * formats.CSR_COLUMNS,), dtype=torch.uint8)
    return counts, columns, x.new_empty((rows * formats.CSR_COLUMNS,), dtype=value_dtype(fmt, x.dtype))


@operator("sparse", "compact(Tensor scratch, Tensor counts, int stride, int total, Tensor(a!)? spill=None) -> Tensor")
def compact(scratch, counts, stride, total, spill=None):
    return scratch.new_empty((total,))


@operator(
    "sparse",
    "csr_compact(Tensor columns, Tensor values, Tensor counts, int total, Tensor(a!)? spill=None) -> (Tensor, Tensor)",
)
def csr_compact(columns, values, counts, total, spill=None):
    return columns.new_empty((total,)), values.new_empty((total,))


@operator(
    "sparse_blocks",
    "compact_blocks(Tensor scratch, Tensor counts, int stride, int total, str fmt) -> (Tensor, Tensor)",
)
def compact_blocks(scratch, counts, stride, total, fmt):
    exponents = scratch.new_empty((formats.scale_count(total, "block"),), dtype=torch.uint8)
    return scratch.new_empty((total,), dtype=CODE_DTYPES[fmt]), exponents


@operator(
    "sparse_blocks",
    "csr_compact_blocks(Tensor columns, Tensor values, Tensor counts, int total, str fmt) -> (Tensor, Tensor, Tensor)",
)
def csr_compact_blocks(columns, values, counts, total, fmt):
    exponents = columns.new_empty((formats.scale_count(total, "block"),))
    return columns.new_empty((total,)), values.new_empty((total,), dtype=CODE_DTYPES[fmt]), exponents


_ZVC = "Tensor words, Tensor counts, Tensor values, Tensor exponents"
_CSR = "Tensor counts, Tensor columns, Tensor values, Tensor exponents"
_FORM = "str fmt, str scaling, bool packed, Tensor? spill=None"


@operator("sparse", f"zvc_decode({_ZVC}, int n, ScalarType dtype, {_FORM}) -> Tensor")
def zvc_decode(words, counts, values, exponents, n, dtype, fmt, scaling, packed, spill=None):
    return values.new_empty((n,), dtype=dtype)


@operator("sparse", f"csr_decode({_CSR}, int n, ScalarType dtype, {_FORM}) -> Tensor")
def csr_decode(counts, columns, values, exponents, n, dtype, fmt, scaling, packed, spill=None):
    return values.new_empty((n,), dtype=dtype)


@operator("ranges", f"zvc_decode_slots({_ZVC}, int first, int n, ScalarType dtype, {_FORM}) -> Tensor")
def zvc_decode_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None):
    return values.new_empty((n,), dtype=dtype)


@operator("ranges", f"csr_decode_rows({_CSR}, int first, int n, ScalarType dtype, {_FORM}) -> Tensor")
def csr_decode_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None):
    return values.new_empty((n,), dtype=dtype)


zvc_relu_backward, zvc_relu_backward_ = _backward("sparse", "zvc_relu_backward", f"{_ZVC}, {_FORM}")
csr_relu_backward, csr_relu_backward_ = _backward("sparse", "csr_relu_backward", f"{_CSR}, {_FORM}")


# --- rebuilds --------------------------------------------------------------------------------------------------------


@operator(
    "rebuild",
    "bn_rebuild(Tensor x, Tensor[] norm, str form, int plane, Tensor? other, Tensor[] other_norm, str other_form, "
    "bool relu, Tensor(a!) out) -> ()",
)
def bn_rebuild(x, norm, form, plane, other, other_norm, other_form, relu, out):
    return None


# --- max-pool --------------------------------------------------------------------------------------------------------


def pool_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Outputs of a pool along one dimension (the last window starts inside the input or its left pad)."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    out = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (out - 1) * stride >= size + padding:
        out -= 1
    return out


@operator(
    "pool",
    "maxpool_forward(Tensor x, int[2] kernel, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, "
    "bool relu, bool zero_code, int bits) -> (Tensor, Tensor)",
)
def maxpool_forward(x, kernel, stride, padding, dilation, ceil_mode, relu, zero_code, bits):
    n, c, h, w = x.shape
    oh = pool_size(h, kernel[0], stride[0], padding[0], dilation[0], ceil_mode)
    ow = pool_size(w, kernel[1], stride[1], padding[1], dilation[1], ceil_mode)
    memory_format = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    y = torch.empty((n, c, oh, ow), dtype=x.dtype, device=x.device, memory_format=memory_format)
    return y, x.new_empty((formats.argmax_bytes(n * c * oh * ow, bits),), dtype=torch.uint8)


@operator(
    "pool",
    "maxpool_backward(Tensor grad_y, Tensor codes, int height, int width, int[2] kernel, int[2] stride, "
    "int[2] padding, int[2] dilation, bool channels_last, bool zero_code, int bits) -> Tensor",
)
def maxpool_backward(grad_y, codes, height, width, kernel, stride, padding, dilation, channels_last, zero_code, bits):
    n, c = grad_y.shape[:2]
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    shape = (n, c, height, width)
    return torch.empty(shape, dtype=grad_y.dtype, device=grad_y.device, memory_format=memory_format)


@operator("nibbles", "nibbles_pack(Tensor codes) -> Tensor")
def nibbles_pack(codes):
    return codes.new_empty((formats.argmax_bytes(codes.numel(), 4),))


@operator("nibbles", "nibbles_unpack(Tensor packed, int n) -> Tensor")
def nibbles_unpack(packed, n):
    return packed.new_empty((n,))
