"""What decoding a part of sparse storage demands, for the oracle and the launchers alike; no value is read."""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ceil_div
from gistkit.kernels.sparse.arguments import check_csr, check_zvc


def _check_part(op: str, counts: torch.Tensor, first: int, n: int, width: int) -> None:
    groups = counts.numel()
    if first < 0 or n < 0 or first + ceil_div(n, width) > groups:
        raise ValueError(
            f"{op}: first and n must name a part of the {groups} groups of {width} elements, got first={first}, n={n}; "
            f"start at a group and end within the payload"
        )


def check_zvc_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None) -> None:
    """Raise unless the payload is one of zvc and holds n elements from slot ``first`` on."""
    whole = counts.numel() * ZVC_SLOT
    check_zvc("zvc_decode_slots", words, counts, values, exponents, whole, dtype, fmt, scaling, packed, spill)
    _check_part("zvc_decode_slots", counts, first, n, ZVC_SLOT)


def check_csr_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None) -> None:
    """Raise unless the payload is one of csr and holds n elements from row ``first`` on."""
    whole = counts.numel() * CSR_COLUMNS
    check_csr("csr_decode_rows", counts, columns, values, exponents, whole, dtype, fmt, scaling, packed, spill)
    _check_part("csr_decode_rows", counts, first, n, CSR_COLUMNS)
