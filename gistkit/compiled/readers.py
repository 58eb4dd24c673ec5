"""Who reads a saved tensor in backward, and what it waits for.

A tensor that is decoded or rebuilt in backward is to be made right before its first reader, and not before the gradient
that this reader meets it with: else it would lie there from the beginning of backward on. Views come before what reads
through them, so they are moved behind, next to their readers.
"""

from __future__ import annotations

import operator

from torch import fx

from gistkit.compiled import compat
from gistkit.compiled.split import elements, is_tensor, is_view

SEARCHED = 400
"""Nodes that the search for an incoming gradient looks at."""


def sink_views(node: fx.Node) -> None:
    """Move every view of a node of backward, and views of views, right before its first reader."""
    for user in list(node.users):
        if is_view(user):
            sink_views(user)
            if user.users:
                min(user.users).prepend(user)


def readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a node, through views or not, in order."""
    found: set[fx.Node] = set()
    for user in node.users:
        found.update(readers(user) if is_view(user) else [user])
    return sorted(found)


def awaited(node: fx.Node, reading: list[fx.Node]) -> fx.Node | None:
    """The latest result of a matrix product, a convolution or an attention that a reader of ``node`` needs besides it:
    a buffer in memory anyhow, so waiting for it changes no kernel. None where there is none."""
    first = min(reading)
    seen, stack = {node}, [a for a in first.all_input_nodes if a is not node]
    best: fx.Node | None = None
    while stack and len(seen) < SEARCHED:
        at = stack.pop()
        if at in seen or at.op != "call_function" or (is_tensor(at) and elements(at) <= 1):
            continue
        seen.add(at)
        if _in_memory(at):
            best = at if best is None or best < at else best
        elif best is None or best < at:
            stack.extend(at.all_input_nodes)
    return best


def _in_memory(node: fx.Node) -> bool:
    table = compat.operators()
    made_by = node.args[0] if node.target is operator.getitem else node
    return isinstance(made_by, fx.Node) and is_tensor(node) and table.is_compute_intensive(made_by)
