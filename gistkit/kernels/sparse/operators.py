"""Sparse storage: the elements whose bit pattern is not 0, and where they stood (Gist section III-A, cDMA).

Encoding is one pass over x: values go to a scratch of one slot per count, as sizes must not depend on values; what lies
past a slot's count is undefined. ``compact`` moves the slots' values close together once the total is known. Decoding
reads either form. Offsets into packed arrays are the running sum of the counts, taken on the device: nothing waits.

Formats: ``raw`` keeps the bits; ``fp16``, ``fp10``, ``fp8`` are codes (see reference/narrow.py), scaled ones only in
packed arrays, where fp10 is int32 words in planes. A payload's ``exponents`` are empty where scaling is ``none``.
"""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.sparse.arguments import bits_of, check_encode, value_dtype
from gistkit.kernels.sparse.compact import compact, csr_compact
from gistkit.kernels.sparse.csr_kernels import csr_encode_kernel
from gistkit.kernels.sparse.reading import (
    CSR_ROWS,
    csr_decode,
    csr_relu_backward,
    octets,
    zvc_decode,
    zvc_relu_backward,
)
from gistkit.kernels.sparse.values import TRITON_DTYPES
from gistkit.kernels.sparse.zvc_kernels import zvc_encode_kernel
from gistkit.kernels.warp.lanes import asm_level, launch_warps

__all__ = [
    "compact",
    "csr_compact",
    "csr_decode",
    "csr_encode",
    "csr_relu_backward",
    "zvc_decode",
    "zvc_encode",
    "zvc_relu_backward",
]


def _encode(op: str, x: torch.Tensor, fmt: str, stride: int, index_items: int, index_dtype: torch.dtype):
    """(index, counts, values) to be written, and the constants of either kernel."""
    check_encode(op, x, fmt)
    slots = ceil_div(x.numel(), stride)
    index = torch.empty((slots * index_items,), dtype=index_dtype, device=x.device)
    counts = torch.empty((slots,), dtype=torch.int16, device=x.device)
    values = torch.empty((slots * stride,), dtype=value_dtype(fmt, x.dtype), device=x.device)
    constants = {"FMT": fmt, "DTYPE": TRITON_DTYPES[x.dtype], "WIDE": octets(x), "ASM": asm_level(x)}
    return index, counts, values, constants


def zvc_encode(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(words int32[32*slots], counts int16[slots], values[1024*slots]) of x fp32/bf16/fp16[n]; slots = ceil(n/1024).

    fmt: ``raw`` (values of x's dtype), ``fp16`` and ``fp10`` (int16 codes), ``fp8`` (uint8). Does not synchronise.
    """
    words, counts, values, constants = _encode("zvc_encode", x, fmt, ZVC_SLOT, ZVC_WORDS, torch.int32)
    arguments = (bits_of(x), words.view(torch.uint8), counts, bits_of(values), x.numel())
    launch_warps(zvc_encode_kernel, counts.numel(), x, *arguments, **constants)
    return words, counts, values


def csr_encode(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(columns uint8[256*rows], counts int16[rows], values[256*rows]) of x fp32/bf16/fp16[n]; rows = ceil(n/256).

    fmt as for :func:`zvc_encode`. Does not synchronise.
    """
    columns, counts, values, constants = _encode("csr_encode", x, fmt, CSR_COLUMNS, CSR_COLUMNS, torch.uint8)
    arguments = (bits_of(x), counts, columns, bits_of(values), x.numel())
    launch_warps(csr_encode_kernel, ceil_div(counts.numel(), CSR_ROWS), x, *arguments, **constants)
    return columns, counts, values
