"""Oracle of gistkit.kernels.sparse.blocks: slots packed, then narrow; also what runs on CPU tensors."""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS
from gistkit.kernels.reference import narrow
from gistkit.kernels.reference.sparse import compact
from gistkit.kernels.sparse.arguments import check_blocks, check_compact

_ENCODERS = {"fp16": narrow.fp16_encode, "fp8": narrow.fp8_encode}


def compact_blocks(scratch, counts, stride, total, fmt) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes[total], exponents) of the compacted values, scaled per block."""
    check_blocks("compact_blocks", scratch, counts, stride, total, fmt)
    return _ENCODERS[fmt](compact(scratch, counts, stride, total), "block")


def csr_compact_blocks(columns, values, counts, total, fmt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(columns, codes, exponents) of csr's scratch, likewise."""
    check_compact(columns, counts, CSR_COLUMNS, total)
    check_blocks("csr_compact_blocks", values, counts, CSR_COLUMNS, total, fmt)
    return compact(columns, counts, CSR_COLUMNS, total), *compact_blocks(values, counts, CSR_COLUMNS, total, fmt)
