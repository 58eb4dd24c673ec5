"""Oracle of packed arrays with a spill: which values lie where (gistkit.kernels.sparse.spill), and all of them close
together.

Ends never fall, so the groups that lie in the array come first: it has the first ``cut`` values of the one long array,
the spill has the rest.
"""

from __future__ import annotations

import numpy as np
import torch

from gistkit.kernels.sparse.spill import GROUP_SLOTS, spill_origin


def _cut(counts: torch.Tensor, capacity: int) -> tuple[int, int]:
    """(values of the groups that end within the capacity, all values)."""
    ends = np.concatenate(([0], np.cumsum(counts.numpy(), dtype=np.int64)))
    last = np.append(ends[GROUP_SLOTS : ends.size - 1 : GROUP_SLOTS], ends[-1])
    return int(max(last[last <= capacity], default=0)), int(ends[-1])


def put(packed: torch.Tensor, counts: torch.Tensor, capacity: int, spill: torch.Tensor) -> torch.Tensor:
    """The array of the capacity, and the spill, from packed values."""
    cut, total = _cut(counts, capacity)
    array, origin, run = packed.new_empty((capacity,)), spill_origin(capacity), spill.view(packed.dtype)
    array[:cut] = packed[:cut]
    if cut < total:
        run[cut - origin : total - origin] = packed[cut:total]
    return array


def joined(spill: torch.Tensor, counts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The array with what the spill has of it behind: packed, as without one."""
    cut, total = _cut(counts, values.numel())
    origin, run = spill_origin(values.numel()), spill.view(values.dtype)
    return values if cut == total else torch.cat((values[:cut], run[cut - origin : total - origin]))
