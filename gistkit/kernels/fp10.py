"""Three ``fp10`` codes to a 32-bit word, in planes: of W words, word i holds elements i, i+W and i+2W.

A word's elements are W apart, so every access is to consecutive elements. W is seldom a multiple of 16 elements, so the
second and third plane mostly start at odd addresses. The kernels therefore never assume aligned pointers: all accesses
are one element a lane, neighbours in neighbouring lanes, and no value changes lanes between plane and word.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div
from gistkit.kernels.rounding import decoding_factor, encoding_factor, from_code, to_code, to_scaled_code
from gistkit.kernels.tiling import launch, span

WORDS = 1024


@triton.jit
def _plane(n, words, first, count, PLANE: tl.constexpr):
    """(first element of this program's words in a plane, how many of them are in bounds)."""
    start = first + words * PLANE
    return start, tl.minimum(n - start, count).to(tl.int32)


@triton.jit
def _plane_exponents(exponents_ptr, start, offs, mask, SCALING: tl.constexpr):
    if SCALING == "block":
        blocks = (offs + (start % 128).to(tl.int32)) // 128
        return tl.load(exponents_ptr + start // 128 + blocks, mask, other=127).to(tl.int32)
    else:
        return tl.load(exponents_ptr).to(tl.int32)


@triton.jit
def _plane_code(
    x_ptr, exponents_ptr, n, words, first, count, PLANE: tl.constexpr, SCALING: tl.constexpr, BLOCK: tl.constexpr
):
    """One plane's part of this program's words; int16 x are codes already."""
    start, inside = _plane(n, words, first, count, PLANE)
    offs = tl.arange(0, BLOCK)
    mask = offs < inside
    x = tl.load(x_ptr + start + offs, mask, other=0)
    if x.dtype == tl.int16:
        code = x.to(tl.int32) & 0x3FF
    elif SCALING == "none":
        code = to_code(x, "fp10")
    else:
        b = _plane_exponents(exponents_ptr, start, offs, mask, SCALING)
        code = to_scaled_code(x, encoding_factor(b, "fp10"), "fp10")
    return code << (10 * PLANE)


@triton.jit(do_not_specialize_on_alignment=["x_ptr", "words_ptr"])
def _pack10_kernel(x_ptr, words_ptr, exponents_ptr, n, words, SCALING: tl.constexpr, BLOCK: tl.constexpr):
    """fp10 words of x (values, or int16 codes)."""
    first, count = span(words, BLOCK)
    word = _plane_code(x_ptr, exponents_ptr, n, words, first, count, 0, SCALING, BLOCK)
    word |= _plane_code(x_ptr, exponents_ptr, n, words, first, count, 1, SCALING, BLOCK)
    word |= _plane_code(x_ptr, exponents_ptr, n, words, first, count, 2, SCALING, BLOCK)
    offs = tl.arange(0, BLOCK)
    tl.store(words_ptr + first + offs, word, offs < count)


@triton.jit(do_not_specialize_on_alignment=["x_ptr", "words_ptr"])
def _unpack10_kernel(words_ptr, exponents_ptr, x_ptr, n, words, SCALING: tl.constexpr, BLOCK: tl.constexpr):
    """x of fp10 words."""
    first, count = span(words, BLOCK)
    offs = tl.arange(0, BLOCK)
    word = tl.load(words_ptr + first + offs, offs < count, other=0)
    for plane in tl.static_range(3):
        start, inside = _plane(n, words, first, count, plane)
        mask = offs < inside
        if SCALING == "none":
            x = from_code(word >> (10 * plane), 1.0, "fp10", False, x_ptr.dtype.element_ty)
        else:
            factor = decoding_factor(_plane_exponents(exponents_ptr, start, offs, mask, SCALING), "fp10")
            x = from_code(word >> (10 * plane), factor, "fp10", True, x_ptr.dtype.element_ty)
        tl.store(x_ptr + start + offs, x, mask)


def pack10(x: torch.Tensor, exponents: torch.Tensor, scaling: str) -> torch.Tensor:
    """int32[ceil(n/3)] words of x fp32/bf16/fp16[n] under its exponent bytes, or of int16[n] codes."""
    length = ceil_div(x.numel(), 3)
    words = torch.empty((length,), dtype=torch.int32, device=x.device)
    programs = ceil_div(length, WORDS)
    launch(_pack10_kernel, programs, x, x, words, exponents, x.numel(), length, SCALING=scaling, BLOCK=WORDS)
    return words


def unpack10(words: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """dtype[n] of the words that :func:`pack10` made of values."""
    x = torch.empty((n,), dtype=dtype, device=words.device)
    programs = ceil_div(words.numel(), WORDS)
    launch(_unpack10_kernel, programs, x, words, exponents, x, n, words.numel(), SCALING=scaling, BLOCK=WORDS)
    return x
