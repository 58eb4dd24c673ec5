"""Parts of sparse storage: a run of zvc's slots or csr's rows, decoded alone.

For consumers that take a decoded tensor slice by slice. The kernels are those of the whole: offsets into packed arrays
are absolute, so a launch over some slots needs nothing but the slots' own counts and ends.
"""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.csr_kernels import csr_decode_kernel
from gistkit.kernels.range_args import check_csr_rows, check_zvc_slots
from gistkit.kernels.sparse import AHEAD, CSR_ROWS, _ends, _item_view, _launch
from gistkit.kernels.sparse_args import bits_of
from gistkit.kernels.zvc_kernels import zvc_decode_kernel


def zvc_decode_slots(
    words: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    first: int,
    n: int,
    dtype: torch.dtype,
    fmt: str,
    scaling: str,
    packed: bool,
) -> torch.Tensor:
    """dtype[n]: the n elements from slot ``first`` on. The payload is that of :func:`zvc_decode`, whole.

    Does not synchronise.
    """
    check_zvc_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed)
    x = torch.empty((n,), dtype=dtype, device=values.device)
    slots = slice(first, first + ceil_div(n, ZVC_SLOT))
    _launch(
        zvc_decode_kernel,
        ceil_div(n, ZVC_SLOT),
        x,
        _item_view(x, fmt),
        words[first * ZVC_WORDS :],
        counts[slots],
        _ends(counts)[slots] if packed else counts[slots],
        bits_of(values if packed else values[first * ZVC_SLOT :]),
        exponents,
        n,
        values.numel(),
        FMT=fmt,
        SCALING=scaling,
        PACKED=packed,
        AHEAD=AHEAD[x.element_size()],
        ASM=x.is_cuda,
    )
    return x


def csr_decode_rows(
    counts: torch.Tensor,
    columns: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    first: int,
    n: int,
    dtype: torch.dtype,
    fmt: str,
    scaling: str,
    packed: bool,
) -> torch.Tensor:
    """dtype[n]: the n elements from row ``first`` on. The payload is that of :func:`csr_decode`, whole.

    Does not synchronise.
    """
    check_csr_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed)
    x = torch.empty((n,), dtype=dtype, device=values.device)
    rows = slice(first, first + ceil_div(n, CSR_COLUMNS))
    skipped = 0 if packed else first * CSR_COLUMNS
    _launch(
        csr_decode_kernel,
        ceil_div(ceil_div(n, CSR_COLUMNS), CSR_ROWS),
        x,
        _item_view(x, fmt),
        counts[rows],
        _ends(counts)[rows] if packed else counts[rows],
        columns[skipped:],
        bits_of(values[skipped:]),
        exponents,
        n,
        values.numel(),
        FMT=fmt,
        SCALING=scaling,
        PACKED=packed,
        ROWS=CSR_ROWS,
    )
    return x
