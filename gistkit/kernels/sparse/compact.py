"""Slots' items close together, in an array of the exact size or of a capacity with a spill: the launches
(:mod:`gistkit.kernels.sparse.compact_kernels`).
"""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, ceil_div
from gistkit.kernels.sparse.arguments import bits_of, check_compact
from gistkit.kernels.sparse.compact_kernels import compact_kernel
from gistkit.kernels.sparse.ends import ends
from gistkit.kernels.sparse.spill import check_spill, columns_start
from gistkit.kernels.warp.lanes import launch_warps

# slots a program
ZVC_SLOTS, CSR_SLOTS = 8, 32
RUN = {1: 16, 2: 8, 4: 4}
"""Neighbours a lane, by bytes an item: no more than one 16-byte store."""
PIECES = {1: 2, 2: 4, 4: 4}
PAIR_PIECES = {1: 1, 2: 2, 4: 4}
"""Runs of a lane that are loaded before the first store, by bytes an item."""
UNBOUNDED = 1 << 62
"""A total that no place reaches, redirected or not."""


def compact(
    scratch: torch.Tensor, counts: torch.Tensor, stride: int, total: int, spill: torch.Tensor | None = None
) -> torch.Tensor:
    """The first counts[i] items of every stride-long slot of scratch, close together.

    scratch: any dtype of 1, 2 or 4 bytes, [stride * slots]; counts: int16[slots]; total: the sum of counts, or more
    (the items past the sum are undefined). Returns scratch's dtype, [total]. With a spill total is the array's
    capacity, which the sum may exceed. Does not synchronise.
    """
    check_compact(scratch, counts, stride, total)
    packed = torch.empty((total,), dtype=scratch.dtype, device=scratch.device)
    if spill is not None:
        check_spill("compact", spill, counts, stride, packed)
    _launch(None, scratch, counts, stride, None, packed, spill)
    return packed


def csr_compact(
    columns: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, total: int, spill: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns, values) of csr_encode, each compacted as by :func:`compact`, in one pass. Does not synchronise."""
    check_compact(columns, counts, CSR_COLUMNS, total)
    check_compact(values, counts, CSR_COLUMNS, total)
    packed_columns = torch.empty((total,), dtype=columns.dtype, device=columns.device)
    packed = torch.empty((total,), dtype=values.dtype, device=values.device)
    if spill is not None:
        check_spill("csr_compact", spill, counts, CSR_COLUMNS, packed, packed_columns)
    _launch(columns, values, counts, CSR_COLUMNS, packed_columns, packed, spill)
    return packed_columns, packed


def _launch(columns, values, counts, stride: int, packed_columns, packed, spill) -> None:
    """``columns`` and ``packed_columns`` are None where values alone are packed."""
    pair, total = columns is not None, packed.numel()
    beside = spill if pair and spill is not None else None
    slots = CSR_SLOTS if stride == CSR_COLUMNS else ZVC_SLOTS
    launch_warps(
        compact_kernel, ceil_div(counts.numel(), slots), values,
        columns if pair else bits_of(values), bits_of(values), counts, ends(counts, stride, packed, spill),
        packed_columns if pair else bits_of(packed), bits_of(packed), bits_of(values) if beside is None else beside,
        total if spill is None else UNBOUNDED, counts.numel(), 0 if beside is None else total,
        0 if beside is None else columns_start(values.numel(), total, values.element_size()),
        STRIDE=stride, SLOTS=slots, RUN=RUN[values.element_size()],
        PIECES=(PAIR_PIECES if pair else PIECES)[values.element_size()], COLUMNS=pair, SPILL=beside is not None,
    )  # fmt: skip
