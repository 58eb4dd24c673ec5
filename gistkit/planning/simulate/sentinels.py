"""The 0-d NaN that a tensor reads as once a ReLU took its memory over (:mod:`gistkit.nn.overwrite`): one a dtype,
from the first such ReLU of a forward until the forward ends. A few bytes, but a budget is one of bytes."""

from __future__ import annotations

from collections.abc import Collection

from gistkit.formats import item_bytes
from gistkit.ir import FORWARD, SavedGraph
from gistkit.planning.simulate.intervals import Interval


def sentinels(graph: SavedGraph, inplace: Collection[int]) -> list[Interval]:
    """The memory of the NaNs, ``inplace`` being the numbers of the covered calls that are to overwrite their input."""
    if not inplace:
        return []
    first: dict[str, int] = {}
    tasks = {t.call: t.index for t in graph.tasks if t.phase == FORWARD and t.call >= 0}
    for call in graph.calls:
        if call.covered in inplace and not call.inplace and call.index in tasks:
            dtype = graph.values[call.operands[0]].dtype
            first.setdefault(dtype, tasks[call.index])
    end = max(tasks.values(), default=-1)
    return [Interval(task, end, item_bytes(dtype), -1, "transient") for dtype, task in first.items()]


__all__ = ["sentinels"]
