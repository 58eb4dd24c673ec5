"""Parts of sparse storage: a run of zvc's slots or csr's rows, decoded alone.

For consumers that take a decoded tensor slice by slice. The kernels are those of the whole: offsets into packed arrays
are absolute, so a launch over some slots needs nothing but the slots' own counts and ends.
"""

from __future__ import annotations

import torch

from gistkit.kernels.sparse.range_arguments import check_csr_rows, check_zvc_slots
from gistkit.kernels.sparse.reading import decode_rows, decode_slots


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
    spill: torch.Tensor | None = None,
) -> torch.Tensor:
    """dtype[n]: the n elements from slot ``first`` on. The payload is that of ``zvc_decode``, whole.

    Raises ValueError for a part that the payload does not hold. Does not synchronise.
    """
    check_zvc_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill)
    return decode_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill)


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
    spill: torch.Tensor | None = None,
) -> torch.Tensor:
    """dtype[n]: the n elements from row ``first`` on. The payload is that of ``csr_decode``, whole.

    Raises ValueError for a part that the payload does not hold. Does not synchronise.
    """
    check_csr_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill)
    return decode_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill)
