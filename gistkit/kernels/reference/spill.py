"""Oracle of packed arrays with a spill (gistkit.kernels.sparse.spill): which items lie where, and all close together.
Ends never fall, so the arrays have the first ``cut`` items of all, whole groups, and the spill the rest."""

from __future__ import annotations

import numpy as np
import torch

from gistkit.kernels.sparse.spill import columns_start, group_slots, spill_origin


def _cut(counts: torch.Tensor, stride: int, capacity: int) -> tuple[int, int]:
    """(items of the groups that end within the capacity, all items)."""
    ends = np.concatenate(([0], np.cumsum(counts.numpy(), dtype=np.int64)))
    group = group_slots(stride)
    last = np.append(ends[group : ends.size - 1 : group], ends[-1])
    return int(max(last[last <= capacity], default=0)), int(ends[-1])


def _runs(spill: torch.Tensor, counts: torch.Tensor, stride: int, arrays: tuple[torch.Tensor, ...]):
    """The runs of values and columns, as the arrays' items."""
    whole, (values, *_) = counts.numel() * stride, arrays
    second = columns_start(whole, values.numel(), values.element_size())
    for array, start in zip(arrays, (0, second), strict=False):
        stop = start + columns_start(whole, values.numel(), array.element_size())
        yield spill[start:stop].view(array.dtype)


def put(
    packed: tuple[torch.Tensor, ...], counts: torch.Tensor, stride: int, capacity: int, spill: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Arrays of the capacity, and the spill, from packed ones: values, and csr's columns."""
    cut, total = _cut(counts, stride, capacity)
    origin = spill_origin(capacity)
    arrays = tuple(p.new_empty((capacity,)) for p in packed)
    for array, items in zip(arrays, packed, strict=True):
        array[:cut] = items[:cut]
    if cut < total:
        for run, items in zip(_runs(spill, counts, stride, arrays), packed, strict=True):
            run[cut - origin : total - origin] = items[cut:total]
    return arrays


def joined(
    spill: torch.Tensor | None, counts: torch.Tensor, stride: int, *arrays: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The arrays with what the spill has of them behind: packed, as without one. Themselves where there is no spill."""
    if spill is None or not counts.numel():
        return arrays
    capacity = arrays[0].numel()
    cut, total = _cut(counts, stride, capacity)
    if cut == total:
        return arrays
    origin = spill_origin(capacity)
    runs = _runs(spill, counts, stride, arrays)
    return tuple(torch.cat((a[:cut], r[cut - origin : total - origin])) for a, r in zip(arrays, runs, strict=True))
