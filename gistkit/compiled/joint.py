"""A rewrite of the joint graph of forward and backward, before it is cut: it needs no choice and changes no bit.

Backward of an average pool reads nothing of its input but the shape; a stand-in of one element, expanded, takes its
place, so that the input need not be kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gistkit.compiled.edit import Builder
from gistkit.compiled.split import is_tensor, value

aten = torch.ops.aten
_SHAPE_ONLY = frozenset({
    aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default,
})  # fmt: skip
"""Their second operand is read for its shape alone."""


def shape_only_operands(graph: fx.Graph) -> int:
    """Put stand-ins in place of operands of which only the shape is read; returns how many."""
    count = 0
    for node in list(graph.nodes):
        x: Any = node.args[1] if node.op == "call_function" and node.target in _SHAPE_ONLY else None
        if not is_tensor(x) or x.target is aten.expand.default:
            continue
        build = Builder(graph, node, backward=True)
        one = build.full([], 0, value(x).dtype, value(x).device)
        node.update_arg(1, build(aten.expand.default, one, build.sizes(x)))
        count += 1
    return count


def rewritten(joint: fx.GraphModule) -> dict[str, int]:
    """The rewrite; how often it was done, in words."""
    done = {"operands of which backward reads only the shape": shape_only_operands(joint.graph)}
    joint.graph.eliminate_dead_code()
    joint.graph.lint()
    joint.recompile()
    return done
