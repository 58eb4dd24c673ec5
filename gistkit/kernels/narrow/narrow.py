"""Narrow floats ``fp16``, ``fp10`` and ``fp8``, unscaled and with a power-of-two scale (Gist section IV-A).

Rounding, scaling and error bounds are those of :mod:`gistkit.kernels.reference.narrow`, to the bit; the arithmetic is
in :mod:`gistkit.kernels.narrow.rounding`, the three-to-a-word layout of ``fp10`` in :mod:`gistkit.kernels.narrow.fp10`.

| form | launches |
|---|---|
| unscaled | one |
| per 128 elements | one: a row of the tile is a block |
| per tensor | two: maxima of at most 1024 stretches, then the exponent byte and the codes; no host wait |
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import SCALE_BLOCK, ceil_div, fp10_words, scale_count
from gistkit.kernels.launch.checks import (
    check_dtype,
    check_exponents,
    check_flat,
    check_length,
    check_scaling,
    check_values,
)
from gistkit.kernels.launch.repeated import Repeated, repeated_tiles
from gistkit.kernels.launch.tiling import launch, launch_tiles, span, tile
from gistkit.kernels.narrow.fp8_hardware import hardware_codes
from gistkit.kernels.narrow.fp10 import pack10, unpack10
from gistkit.kernels.narrow.rounding import (
    decoding_factor,
    encoding_factor,
    exponent_byte,
    finite_amax,
    finite_key,
    from_code,
    to_code,
    to_scaled_code,
)
from gistkit.kernels.narrow.tensor_scale import stretch_maxima, tensor_factor
from gistkit.kernels.warp.lanes import asm_level

CODE_DTYPES = {"fp16": torch.int16, "fp10": torch.int32, "fp8": torch.uint8}
BLOCK_ROWS = 32


@triton.jit
def _codes(x, factor, FMT: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """Codes of x, by the hardware's conversion where there is one; factor is ignored unless SCALED."""
    if FMT == "fp8" and ASM >= 90:
        return hardware_codes(x, tl.broadcast_to(factor, x.shape) if SCALED else x, SCALED)
    elif SCALED:
        return to_scaled_code(x, factor, FMT)
    else:
        return to_code(x, FMT)


@triton.jit
def _encode_tile(x_ptr, codes_ptr, offs, mask, factor, FMT: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """Codes (int16/uint8) of x at the masked offs."""
    code = _codes(tl.load(x_ptr + offs, mask, other=0), factor, FMT, SCALED, ASM)
    tl.store(codes_ptr + offs, code.to(codes_ptr.dtype.element_ty), mask)


@triton.jit
def _encode_span(
    x_ptr,
    codes_ptr,
    n,
    factor,
    FMT: tl.constexpr,
    SCALED: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Codes of this program's tile.

    Where n is any number (ALIGNED not set), a tile that is whole has a constant for its bound, which leaves wide
    accesses possible: item by item, the values that zvc stores took three times a copy's time on an H200.
    """
    first, _, _, offs, mask = tile(n, ROWS, ALIGNED)
    x_ptr += first
    codes_ptr += first
    if ALIGNED:
        _encode_tile(x_ptr, codes_ptr, offs, mask, factor, FMT, SCALED, ASM)
    elif n - first >= ROWS * 8:
        _encode_tile(x_ptr, codes_ptr, offs, offs < ROWS * 8, factor, FMT, SCALED, ASM)
    else:
        _encode_tile(x_ptr, codes_ptr, offs, mask, factor, FMT, SCALED, ASM)


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, n, FMT: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Unscaled codes (int16/uint8) of x."""
    _encode_span(x_ptr, codes_ptr, n, 1.0, FMT, False, ASM, ROWS, ALIGNED)


@triton.jit
def _tensor_encode_kernel(
    x_ptr,
    codes_ptr,
    exponent_ptr,
    amax_ptr,
    stretches,
    n,
    FMT: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Codes (int16/uint8) of x under one exponent byte, which is written too, from x's maxima."""
    factor = tensor_factor(amax_ptr, stretches, exponent_ptr, FMT)
    _encode_span(x_ptr, codes_ptr, n, factor, FMT, True, ASM, ROWS, ALIGNED)


@triton.jit
def _decode_kernel(
    codes_ptr,
    exponent_ptr,
    x_ptr,
    n,
    FMT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """x of codes, unscaled or under the one exponent byte."""
    first, _, _, offs, mask = tile(n, ROWS, ALIGNED)
    code = tl.load(codes_ptr + first + offs, mask, other=0).to(tl.int32)
    factor = decoding_factor(tl.load(exponent_ptr).to(tl.int32), FMT) if SCALED else 1.0
    tl.store(x_ptr + first + offs, from_code(code, factor, FMT, SCALED, x_ptr.dtype.element_ty), mask)


@triton.jit
def _block_tile(n, ROWS: tl.constexpr):
    """(first element, blocks, blocks in bounds, elements, elements in bounds): a row is a block of 128 elements."""
    first, count = span(n, ROWS * 128)
    blocks = tl.arange(0, ROWS)
    offs = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    return first, blocks, blocks * 128 < count, offs, offs < count


@triton.jit
def _encode_blocks(
    x_ptr, codes_ptr, exponents_ptr, blocks, block_mask, offs, mask, FMT: tl.constexpr, ASM: tl.constexpr
):
    """Exponent bytes of the masked blocks and the codes under them."""
    x = tl.load(x_ptr + offs, mask, other=0)
    b = exponent_byte(finite_amax(tl.max(finite_key(x), axis=1)), FMT)
    tl.store(exponents_ptr + blocks, b.to(tl.uint8), block_mask)
    code = _codes(x, encoding_factor(b, FMT)[:, None], FMT, True, ASM)
    tl.store(codes_ptr + offs, code.to(codes_ptr.dtype.element_ty), mask)


@triton.jit
def _block_encode_kernel(
    x_ptr,
    codes_ptr,
    exponents_ptr,
    n,
    FMT: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Exponent bytes of blocks of 128 elements and the codes under them; ALIGNED as in _encode_span."""
    first, blocks, block_mask, offs, mask = _block_tile(n, ROWS)
    x_ptr += first
    codes_ptr += first
    exponents_ptr += first // 128
    if ALIGNED:
        _encode_blocks(x_ptr, codes_ptr, exponents_ptr, blocks, block_mask, offs, mask, FMT, ASM)
    elif n - first >= ROWS * 128:
        _encode_blocks(x_ptr, codes_ptr, exponents_ptr, blocks, blocks < ROWS, offs, offs < ROWS * 128, FMT, ASM)
    else:
        _encode_blocks(x_ptr, codes_ptr, exponents_ptr, blocks, block_mask, offs, mask, FMT, ASM)


@triton.jit
def _block_decode_kernel(codes_ptr, exponents_ptr, x_ptr, n, FMT: tl.constexpr, ROWS: tl.constexpr):
    """x of codes under one exponent byte per 128 elements."""
    first, blocks, block_mask, offs, mask = _block_tile(n, ROWS)
    b = tl.load(exponents_ptr + first // 128 + blocks, block_mask, other=127).to(tl.int32)
    code = tl.load(codes_ptr + first + offs, mask, other=0).to(tl.int32)
    x = from_code(code, decoding_factor(b, FMT)[:, None], FMT, True, x_ptr.dtype.element_ty)
    tl.store(x_ptr + first + offs, x, mask)


def _new_exponents(op: str, x: torch.Tensor, scaling: str) -> torch.Tensor:
    check_values(op, "x", x)
    check_scaling(op, scaling)
    exponents = torch.empty((scale_count(x.numel(), scaling),), dtype=torch.uint8, device=x.device)
    # of no elements no program runs
    return exponents if x.numel() else exponents.fill_(127)


def _encode(x: torch.Tensor, fmt: str, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = _new_exponents(f"{fmt}_encode", x, scaling)
    codes = torch.empty((x.numel(),), dtype=CODE_DTYPES[fmt], device=x.device)
    if scaling == "block":
        programs = ceil_div(x.numel(), SCALE_BLOCK * BLOCK_ROWS)
        launch(
            _block_encode_kernel,
            programs,
            x,
            x,
            codes,
            exponents,
            x.numel(),
            FMT=fmt,
            ASM=asm_level(x),
            ROWS=BLOCK_ROWS,
            ALIGNED=x.numel() % 16 == 0,
        )
        return codes, exponents
    if scaling == "tensor":
        amax = stretch_maxima(x)
        launch_tiles(_tensor_encode_kernel, x, x, codes, exponents, amax, amax.numel(), FMT=fmt, ASM=asm_level(x))
    else:
        launch_tiles(_encode_kernel, x, x, codes, FMT=fmt, ASM=asm_level(x))
    return codes, exponents


def _decode(
    codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, fmt: str, scaling: str
) -> torch.Tensor:
    op = f"{fmt}_decode"
    check_dtype(op, "dtype", dtype)
    check_dtype(op, "codes", codes.dtype, (CODE_DTYPES[fmt],))
    check_length(op, "codes", codes, n, f"{n} values")
    check_exponents(op, exponents, n, scaling)
    x = torch.empty((n,), dtype=dtype, device=codes.device)
    if scaling == "block":
        programs = ceil_div(n, SCALE_BLOCK * BLOCK_ROWS)
        launch(_block_decode_kernel, programs, x, codes, exponents, x, n, FMT=fmt, ROWS=BLOCK_ROWS)
    else:
        launch_tiles(_decode_kernel, x, codes, exponents, x, FMT=fmt, SCALED=scaling == "tensor")
    return x


def repeated_codes(x: torch.Tensor, fmt: str, scaling: str) -> tuple[Repeated, Repeated]:
    """Launches of (x, codes) and back of (codes, codes, x), unscaled; under ``block`` (x, codes, exponents) and (codes,
    exponents, x): ``fp16`` and ``fp8`` of dense tensors of x's kind."""
    if scaling == "none":
        encode = repeated_tiles(_encode_kernel, x, FMT=fmt, ASM=asm_level(x))
        return encode, repeated_tiles(_decode_kernel, x, FMT=fmt, SCALED=False)
    n = x.numel()
    programs, where = ceil_div(n, SCALE_BLOCK * BLOCK_ROWS), (x.get_device(), (n,))
    aligned = {"ASM": asm_level(x), "ROWS": BLOCK_ROWS, "ALIGNED": n % 16 == 0}
    encode = Repeated(_block_encode_kernel, programs, *where, FMT=fmt, **aligned)
    return encode, Repeated(_block_decode_kernel, programs, *where, FMT=fmt, ROWS=BLOCK_ROWS)


def fp16_encode(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(int16[n] codes, uint8[scale_count(n, scaling)] exponent bytes) of x fp32/bf16/fp16[n]. Does not synchronise."""
    return _encode(x, "fp16", scaling)


def fp8_encode(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8[n] codes, uint8[scale_count(n, scaling)] exponent bytes) of x fp32/bf16/fp16[n]. Does not synchronise."""
    return _encode(x, "fp8", scaling)


def fp10_encode(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32[fp10_words(n)] words, uint8[scale_count(n, scaling)] exponent bytes) of x[n]. Does not synchronise."""
    exponents = _new_exponents("fp10_encode", x, scaling)
    return pack10(x, exponents, scaling), exponents


def fp10_pack(codes: torch.Tensor) -> torch.Tensor:
    """int32[fp10_words(n)] words in plane layout from unpacked int16[n] codes. Does not synchronise."""
    check_flat("fp10_pack", "codes", codes)
    check_dtype("fp10_pack", "codes", codes.dtype, (torch.int16,))
    return pack10(codes, codes, "none")


def fp16_decode(codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """dtype[n] from what fp16_encode made with the same scaling. Does not synchronise."""
    return _decode(codes, exponents, n, dtype, "fp16", scaling)


def fp8_decode(codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """dtype[n] from what fp8_encode made with the same scaling. Does not synchronise."""
    return _decode(codes, exponents, n, dtype, "fp8", scaling)


def fp10_decode(codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """dtype[n] from what fp10_encode made with the same scaling. Does not synchronise."""
    check_dtype("fp10_decode", "dtype", dtype)
    check_dtype("fp10_decode", "codes", codes.dtype, (torch.int32,))
    check_length("fp10_decode", "codes", codes, fp10_words(n), f"{n} values, three a word")
    check_exponents("fp10_decode", exponents, n, scaling)
    return unpack10(codes, exponents, n, dtype, scaling)
