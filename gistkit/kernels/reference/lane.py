"""Oracle of gistkit.kernels.sparse.lane; also what runs on CPU tensors."""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, ceil_div
from gistkit.kernels.reference.sparse import compact
from gistkit.kernels.sparse.spill import ALIGNMENT, known_bytes, packed_bytes


def ship(
    scratch: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, stride: int, lane: torch.Tensor,
    begin: torch.Tensor, after: torch.Tensor, place: torch.Tensor,
) -> None:  # fmt: skip
    """Pack the slots of scratch (1, 2 or 4 bytes an item), and of csr's columns, into ``lane`` from byte begin[0] on;
    after[0] becomes where the next may begin. Three runs begin at multiples of 512 bytes: what is not packed (zvc's
    words, and the counts behind them), values, columns.

    index: words or columns. lane: uint8, with room for the worst case. begin, after: int64, begin[0] a multiple of 512.
    place: int64[2], which becomes (first byte, items).
    """
    start, total = int(begin[0]), int(counts.sum(dtype=torch.int64))
    columns = stride == CSR_COLUMNS
    known = torch.cat([t.view(torch.uint8) for t in ((counts,) if columns else (index, counts))])
    lane[start : start + known.numel()] = known
    first = start + known_bytes(counts.numel(), stride)
    for at, items in zip(_runs(first, total, scratch), (scratch, index) if columns else (scratch,), strict=False):
        packed = compact(items, counts, stride, total).view(torch.uint8)
        lane[at : at + packed.numel()] = packed
    place[0], place[1] = start, total
    after[0] = first + packed_bytes(total, scratch.element_size(), columns)


def unship(
    lane: torch.Tensor, place: torch.Tensor, known: torch.Tensor, values: torch.Tensor, columns: torch.Tensor | None
) -> None:
    """The items that :func:`ship` has packed, into the first of values and columns, which are long enough for any
    number of them. What lies behind them stays as it is. known: uint8, gets the run of what is not packed, whose length
    it has."""
    start, total = place.tolist()
    first = start + known.numel()
    known.copy_(lane[start:first])
    for at, items in zip(_runs(first, total, values), (values, columns), strict=False):
        if items is not None:
            run = items[:total].view(torch.uint8)
            run.copy_(lane[at : at + run.numel()])


def _runs(start: int, total: int, values: torch.Tensor) -> tuple[int, int]:
    return start, start + ceil_div(total * values.element_size(), ALIGNMENT) * ALIGNMENT
