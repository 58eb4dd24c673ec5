"""A minimum cut through values that are made from each other: which to keep, so that the needed ones can be made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

UNKEPT = 1 << 60
"""A weight from here on: a value that cannot be kept."""
_INFINITE, _FINEST = 1 << 30, 1 << 28


def least_cut(weights: Mapping[str, int], inputs: Mapping[str, Sequence[str]], roots: Collection[str]) -> set[str]:
    """Names of the values to keep, of least weight in all, so that ``roots`` can be made from them. ``weights``: of all
    values. ``inputs``: names of what a value is made from; one that is not in it must be kept, or what is made from it.
    Names that have no weight cost nothing.

    Every value is an edge whose capacity is its weight. What has no inputs hangs on the source, the roots on the sink;
    a cut keeps the values whose edges it goes through. Of the cheapest cuts the one nearest to the roots is taken.
    """
    number = {name: i for i, name in enumerate(weights)}
    source, sink = 2 * len(number), 2 * len(number) + 1
    total = sum(weights[name] for name in roots if weights.get(name, UNKEPT) < UNKEPT)
    unit = max(1, total // _FINEST)
    edges: list[tuple[int, int, int]] = []
    for name, i in number.items():
        weight = weights[name]
        edges.append((2 * i, 2 * i + 1, _INFINITE if weight >= UNKEPT else min(-(-weight // unit), _INFINITE)))
        if name in roots:
            edges.append((2 * i + 1, sink, _INFINITE))
        if name in inputs:
            edges.extend((2 * number[n] + 1, 2 * i, _INFINITE) for n in dict.fromkeys(inputs[name]) if n in number)
        else:
            edges.append((source, 2 * i, _INFINITE))
    behind = _sink_side(edges, source, sink)
    return {name for name, i in number.items() if not behind[2 * i] and behind[2 * i + 1]}


def _sink_side(edges: list[tuple[int, int, int]], source: int, sink: int) -> np.ndarray:
    """Whether each vertex is behind the minimum cut that is nearest to the sink."""
    from scipy.sparse import csr_array  # not at the import of gistkit
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    rows, columns, capacities = np.array(edges, dtype=np.int32).T
    capacity = csr_array((capacities, (rows, columns)), shape=(sink + 1, sink + 1), dtype=np.int32)
    flow = maximum_flow(capacity, source, sink).flow
    left = (capacity - flow).tocsr()
    left.data = np.where(left.data > 0, 1, 0).astype(np.int32)
    left.eliminate_zeros()
    behind = np.zeros(sink + 1, dtype=bool)
    behind[breadth_first_order(left.T.tocsr(), sink, return_predecessors=False)] = True
    return behind
