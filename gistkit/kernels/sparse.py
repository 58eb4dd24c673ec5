"""Sparse storage: the elements whose bit pattern is not 0, and where they stood (Gist section III-A, cDMA).

Encoding is one pass over x: values go to a scratch of one slot per count, as sizes must not depend on values; what lies
past a slot's count is undefined. ``compact`` moves the slots' values close together once the total is known. Decoding
reads either form. Offsets into packed arrays are the running sum of the counts, taken on the device: nothing waits.

Formats: ``raw`` keeps the bits; ``fp16``, ``fp10``, ``fp8`` are codes (see reference/narrow.py), scaled ones only in
packed arrays, where fp10 is int32 words in planes. A payload's ``exponents`` are empty where scaling is ``none``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.checks import check_values
from gistkit.kernels.compact import compact, csr_compact
from gistkit.kernels.csr_kernels import csr_encode_kernel
from gistkit.kernels.csr_readers import csr_backward_kernel, csr_decode_kernel
from gistkit.kernels.lanes import asm_level, launch_warps
from gistkit.kernels.sparse_args import bits_of, check_csr, check_encode, check_zvc, value_dtype
from gistkit.kernels.sparse_ends import ends
from gistkit.kernels.zvc_kernels import zvc_backward_kernel, zvc_decode_kernel, zvc_encode_kernel

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CSR_ROWS = 4  # rows a program
# octets of a lane in flight when csr is read; fp10's three planes make one of 40 bytes, others take 16 to 24
CSR_PIECES = {"raw": 2, "fp16": 2, "fp10": 1, "fp8": 2}
__all__ = [
    "compact",
    "csr_compact",
    "csr_decode",
    "csr_encode",
    "csr_relu_backward",
    "decode_rows",
    "decode_slots",
    "zvc_decode",
    "zvc_encode",
    "zvc_relu_backward",
]


def _item_view(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """What a kernel sees of x: bit patterns where they are only moved."""
    return bits_of(x) if fmt == "raw" else x


def _octets(x: torch.Tensor) -> bool:
    """Whether eight neighbours of x can be loaded at once."""
    return x.is_cuda and _aligned(x) and x.numel() % 8 == 0


def _aligned(*arrays: torch.Tensor) -> bool:
    """Whether eight neighbours of each can be loaded at once from every multiple of 8 on."""
    return all(a.data_ptr() % 16 == 0 for a in arrays)


def zvc_encode(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(words int32[32*slots], counts int16[slots], values[1024*slots]) of x fp32/bf16/fp16[n]; slots = ceil(n/1024).

    fmt: ``raw`` (values of x's dtype), ``fp16`` and ``fp10`` (int16 codes), ``fp8`` (uint8). Does not synchronise.
    """
    check_encode("zvc_encode", x, fmt)
    slots = ceil_div(x.numel(), ZVC_SLOT)
    words = torch.empty((slots * ZVC_WORDS,), dtype=torch.int32, device=x.device)
    counts = torch.empty((slots,), dtype=torch.int16, device=x.device)
    values = torch.empty((slots * ZVC_SLOT,), dtype=value_dtype(fmt, x.dtype), device=x.device)
    launch_warps(
        zvc_encode_kernel,
        slots,
        x,
        bits_of(x),
        words.view(torch.uint8),
        counts,
        bits_of(values),
        x.numel(),
        FMT=fmt,
        DTYPE=TRITON_DTYPES[x.dtype],
        WIDE=_octets(x),
        ASM=asm_level(x),
    )
    return words, counts, values


def csr_encode(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(counts int16[rows], columns uint8[256*rows], values[256*rows]) of x fp32/bf16/fp16[n]; rows = ceil(n/256).

    fmt as for :func:`zvc_encode`. Does not synchronise.
    """
    check_encode("csr_encode", x, fmt)
    rows = ceil_div(x.numel(), CSR_COLUMNS)
    counts = torch.empty((rows,), dtype=torch.int16, device=x.device)
    columns = torch.empty((rows * CSR_COLUMNS,), dtype=torch.uint8, device=x.device)
    values = torch.empty((rows * CSR_COLUMNS,), dtype=value_dtype(fmt, x.dtype), device=x.device)
    launch_warps(
        csr_encode_kernel,
        ceil_div(rows, CSR_ROWS),
        x,
        bits_of(x),
        counts,
        columns,
        bits_of(values),
        x.numel(),
        FMT=fmt,
        DTYPE=TRITON_DTYPES[x.dtype],
        WIDE=_octets(x),
        ASM=asm_level(x),
    )
    return counts, columns, values


def decode_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed) -> torch.Tensor:
    """dtype[n] from slot ``first`` of a checked zvc payload on. Does not synchronise."""
    x = torch.empty((n,), dtype=dtype, device=values.device)
    slots = slice(first, first + ceil_div(n, ZVC_SLOT))
    items = values if packed else values[first * ZVC_SLOT :]
    launch_warps(
        zvc_decode_kernel,
        ceil_div(n, ZVC_SLOT),
        x,
        _item_view(x, fmt),
        words[first * ZVC_WORDS :].view(torch.uint8),
        counts[slots],
        ends(counts)[slots] if packed else counts[slots],
        bits_of(items),
        exponents,
        n,
        values.numel(),
        FMT=fmt,
        SCALING=scaling,
        PACKED=packed,
        DTYPE=TRITON_DTYPES[dtype],
        WIDE=_aligned(items),
        WHOLE=n % 8 == 0,
        ASM=asm_level(x),
    )
    return x


def decode_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed) -> torch.Tensor:
    """dtype[n] from row ``first`` of a checked csr payload on. Does not synchronise."""
    x = torch.empty((n,), dtype=dtype, device=values.device)
    rows = slice(first, first + ceil_div(n, CSR_COLUMNS))
    skipped = 0 if packed else first * CSR_COLUMNS
    columns, values = columns[skipped:], values[skipped:]
    launch_warps(
        csr_decode_kernel,
        ceil_div(ceil_div(n, CSR_COLUMNS), CSR_ROWS),
        x,
        _item_view(x, fmt),
        counts[rows],
        ends(counts)[rows] if packed else counts[rows],
        columns,
        bits_of(values),
        exponents,
        n,
        values.numel(),
        FMT=fmt,
        SCALING=scaling,
        PACKED=packed,
        DTYPE=TRITON_DTYPES[dtype],
        WIDE=_aligned(columns, values),
        WHOLE=n % 8 == 0,
        PIECES=CSR_PIECES[fmt],
        ASM=asm_level(x),
    )
    return x


def zvc_decode(
    words: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    n: int,
    dtype: torch.dtype,
    fmt: str,
    scaling: str,
    packed: bool,
) -> torch.Tensor:
    """dtype[n] from zvc's payload: values at 1024*slot (packed=False) or close together (packed=True).

    Does not synchronise.
    """
    check_zvc("zvc_decode", words, counts, values, exponents, n, dtype, fmt, scaling, packed)
    return decode_slots(words, counts, values, exponents, 0, n, dtype, fmt, scaling, packed)


def csr_decode(
    counts: torch.Tensor,
    columns: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    n: int,
    dtype: torch.dtype,
    fmt: str,
    scaling: str,
    packed: bool,
) -> torch.Tensor:
    """dtype[n] from csr's payload: rows at 256*row (packed=False) or close together (packed=True).

    Does not synchronise.
    """
    check_csr("csr_decode", counts, columns, values, exponents, n, dtype, fmt, scaling, packed)
    return decode_rows(counts, columns, values, exponents, 0, n, dtype, fmt, scaling, packed)


def zvc_relu_backward(
    grad: torch.Tensor,
    words: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    fmt: str,
    scaling: str,
    packed: bool,
) -> torch.Tensor:
    """grad[n] where an element was stored that is not a negative zero, else +0: ReLU's backward from its output.

    Exact under the lossy formats too: a small positive value may have become the code +0, but its bit is set. Does not
    synchronise.
    """
    n, dtype = grad.numel(), values.dtype if fmt == "raw" else grad.dtype
    check_values("zvc_relu_backward", "grad", grad)
    check_zvc("zvc_relu_backward", words, counts, values, exponents, n, dtype, fmt, scaling, packed)
    grad_x = torch.empty_like(grad)
    launch_warps(
        zvc_backward_kernel,
        counts.numel(),
        grad,
        bits_of(grad_x),
        bits_of(grad),
        words.view(torch.uint8),
        counts,
        ends(counts) if packed else counts,
        bits_of(values),
        n,
        values.numel(),
        FMT=fmt,
        PACKED=packed,
        WIDE=_aligned(values),
        GRAD_WIDE=_octets(grad),
        WHOLE=n % 8 == 0,
        ASM=asm_level(grad),
    )
    return grad_x


def csr_relu_backward(
    grad: torch.Tensor,
    counts: torch.Tensor,
    columns: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    fmt: str,
    scaling: str,
    packed: bool,
) -> torch.Tensor:
    """As :func:`zvc_relu_backward`, from csr's payload. Does not synchronise."""
    n, dtype = grad.numel(), values.dtype if fmt == "raw" else grad.dtype
    check_values("csr_relu_backward", "grad", grad)
    check_csr("csr_relu_backward", counts, columns, values, exponents, n, dtype, fmt, scaling, packed)
    grad_x = torch.empty_like(grad)
    launch_warps(
        csr_backward_kernel,
        ceil_div(counts.numel(), CSR_ROWS),
        grad,
        bits_of(grad_x),
        bits_of(grad),
        counts,
        ends(counts) if packed else counts,
        columns,
        bits_of(values),
        n,
        values.numel(),
        FMT=fmt,
        PACKED=packed,
        WIDE=_aligned(columns, values),
        GRAD_WIDE=_octets(grad),
        WHOLE=n % 8 == 0,
        PIECES=CSR_PIECES[fmt],
        ASM=asm_level(grad),
    )
    return grad_x
