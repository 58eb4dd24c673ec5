"""Oracle of gistkit.kernels.sparse.lane; also what runs on CPU tensors."""

from __future__ import annotations

import torch

from gistkit.formats import ZVC_SLOT
from gistkit.kernels.reference.sparse import compact
from gistkit.kernels.sparse.spill import packed_bytes


def ship(
    scratch: torch.Tensor, words: torch.Tensor, counts: torch.Tensor, lane: torch.Tensor, begin: torch.Tensor,
    after: torch.Tensor, place: torch.Tensor, rest: torch.Tensor,
) -> None:  # fmt: skip
    """Pack the slots of zvc's scratch (1, 2 or 4 bytes an item) into ``lane`` from byte begin[0] on; after[0] becomes
    where the next may begin, a multiple of 512. Words and counts go to ``rest``, one behind the other.

    lane: uint8, with room for the worst case. begin, after: int64, begin[0] a multiple of 512. place: int64[2], which
    becomes (first byte, items). rest: uint8.
    """
    start, total = int(begin[0]), int(counts.sum(dtype=torch.int64))
    packed = compact(scratch, counts, ZVC_SLOT, total).view(torch.uint8)
    lane[start : start + packed.numel()] = packed
    place[0], place[1] = start, total
    after[0] = start + packed_bytes(total, scratch.element_size())
    known = torch.cat((words.view(torch.uint8), counts.view(torch.uint8)))
    rest[: known.numel()] = known


def unship(lane: torch.Tensor, place: torch.Tensor, values: torch.Tensor) -> None:
    """The items that :func:`ship` has packed, into the first of values, which are long enough for any number of them.
    What lies behind them stays as it is."""
    start, total = place.tolist()
    run = values[:total].view(torch.uint8)
    run.copy_(lane[start : start + run.numel()])
