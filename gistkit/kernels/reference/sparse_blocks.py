"""Oracle of gistkit.kernels.sparse.blocks: slots packed, then narrow; also what runs on CPU tensors."""

from __future__ import annotations

import torch

from gistkit.kernels.reference import narrow
from gistkit.kernels.reference.sparse import compact
from gistkit.kernels.sparse.arguments import check_blocks


def compact_blocks(scratch, counts, stride, total, fmt) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes[total], exponents) of the compacted values, scaled per block."""
    check_blocks("compact_blocks", scratch, counts, stride, total, fmt)
    return narrow.narrow_encode(compact(scratch, counts, stride, total), fmt, "block")
