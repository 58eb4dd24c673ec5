"""Who reads a saved tensor in backward, and what it waits for.

A tensor that is decoded or rebuilt in backward is to be made right before its first reader, and not before the gradient
that this reader meets it with: else it would lie there from the beginning of backward on."""

from __future__ import annotations

import torch
from torch import fx

from gistkit.compiled import compat
from gistkit.compiled.split import elements, is_tensor, is_view, origin

LOADS = "gistkit_loads"
"""In the ``meta`` of a rebuild's nodes: whether it reads a buffer, though Inductor could fuse it with what makes it."""


def sink_views(node: fx.Node) -> None:
    """Move every view of a node of backward, and views of views, right before its first reader."""
    for user in list(node.users):
        if is_view(user):
            sink_views(user)
            if user.users:
                min(user.users).prepend(user)


def readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a node, through views or not, in order; the node itself where it is no view."""
    if not is_view(node):
        return [node]
    return sorted({reader for user in node.users for reader in readers(user)})


def reads_memory(user: fx.Node) -> bool:
    """Whether a user, or what reads through it where it is a view, is not fused by Inductor with what it reads."""
    return any(not compat.operators().is_fusible(reader) for reader in readers(user))


def fuse_together(first: fx.Node, second: fx.Node) -> bool:
    """Whether no matrix product, convolution or attention stands between two nodes, the first before the second."""
    while first is not second:
        first = first.next
        if first.op != "call_function" or compat.operators().is_compute_intensive(first):
            return first is second
    return True


def awaited(node: fx.Node, user: fx.Node) -> fx.Node | None:
    """The latest result of a matrix product, a convolution or an attention that the first reader behind ``user`` needs
    besides ``node``: a buffer in memory anyhow, so waiting for it changes no kernel. None where there is none. A reader
    that rebuilds another tensor waits as that does."""
    first = _rebuilt_by(min(readers(user), default=user))
    if first.target is torch.ops.gistkit.materialised.default:
        return first.args[1] if first.args[1] < user else None  # type: ignore[operator,return-value]
    seen, stack = {node}, [a for a in first.all_input_nodes if a is not node]
    best: fx.Node | None = None
    while stack and len(seen) < 400:  # far enough for an incoming gradient
        at = stack.pop()
        if at in seen or at.op != "call_function" or (is_tensor(at) and elements(at) <= 1):
            continue
        seen.add(at)
        if not is_tensor(at) or not compat.operators().is_compute_intensive(origin(at)):
            if best is None or best < at:
                stack.extend(at.all_input_nodes)
        elif at < user and (best is None or best < at):
            best = at
    return best


def _rebuilt_by(node: fx.Node) -> fx.Node:
    """The buffer that a node of a rebuild ends in; the node itself where it is of none."""
    found = node
    while found.target is not torch.ops.gistkit.materialised.default:
        if LOADS not in found.meta or not found.users:
            return node
        found = min(found.users)
    return found
