"""The cheapest set of values to keep, from which the needed ones can be computed: a minimum cut.

Every value is an edge whose capacity is the bytes to keep it. What only forward can make hangs on the source, what
backward reads on the sink; a cut keeps the values whose edges it goes through, and all behind it is computed anew. Of
the cheapest cuts the one nearest to backward is taken, so nothing is rebuilt that saves no byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from gistkit.compiled.rebuilds.flow import FREE, UNKEPT, Flow, Value

_INFINITE = 1 << 30
_FINEST = 1 << 28


def region(flow: Flow, roots: Collection[str], anew: Callable[[Value], bool], kept: Collection[str]) -> list[Value]:
    """What ``roots`` are computed from, themselves included: up to what is free or in ``kept``, and what cannot be
    computed ``anew``; in forward's order."""
    found: set[str] = set()
    stack = list(roots)
    while stack:
        v = flow.values[stack.pop()]
        if v.name in found or v.kind == FREE or v.name in kept:
            continue
        found.add(v.name)
        if anew(v):
            stack.extend(v.inputs)
    return [v for v in flow.values.values() if v.name in found]


def cheapest(
    flow: Flow, roots: Collection[str], anew: Callable[[Value], bool], weight: Callable[[Value], int],
    kept: Collection[str],
) -> set[str]:  # fmt: skip
    """Names of the values to keep besides ``kept``, which cost nothing here."""
    values = region(flow, roots, anew, kept)
    if not values:
        return set()
    number = {v.name: i for i, v in enumerate(values)}
    source, sink = 2 * len(values), 2 * len(values) + 1
    needed = set(roots)
    total = sum(weight(v) for v in values if v.name in needed and weight(v) < UNKEPT)
    unit = max(1, total // _FINEST)
    edges: list[tuple[int, int, int]] = []
    for i, v in enumerate(values):
        edges.append((2 * i, 2 * i + 1, _INFINITE if weight(v) >= UNKEPT else min(-(-weight(v) // unit), _INFINITE)))
        if v.name in needed:
            edges.append((2 * i + 1, sink, _INFINITE))
        if anew(v):
            edges.extend((2 * number[n] + 1, 2 * i, _INFINITE) for n in dict.fromkeys(v.inputs) if n in number)
        else:
            edges.append((source, 2 * i, _INFINITE))
    behind = _sink_side(edges, source, sink)
    return {v.name for i, v in enumerate(values) if not behind[2 * i] and behind[2 * i + 1]}


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
