"""The cheapest set of values to keep, from which the needed ones are computed; nothing is that saves no byte by it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gistkit.compiled.rebuilds.flow import FREE, Flow, Value
from gistkit.planning.min_cut import least_cut


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
    weights, inputs = {v.name: weight(v) for v in values}, {v.name: v.inputs for v in values if anew(v)}
    return least_cut(weights, inputs, set(roots)) if values else set()
