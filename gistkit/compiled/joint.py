"""Rewrites of the joint graph of forward and backward, before it is cut: they need no choice and change no bit.

*Shapes only.* Backward of an average pool reads nothing of its input but the shape; a stand-in of one element,
expanded, takes its place, so that the input need not be kept.

*Masks behind max-pools.* ``where(relu <= 0, 0, pool_backward(g))`` becomes ``pool_backward(where(pooled <= 0, 0, g))``:
an element that a window chose is the window's output, so the output, which is a quarter of the size and which the next
layer keeps anyhow, tells where the gradient passes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from gistkit.compiled.edit import Builder
from gistkit.compiled.split import is_tensor, value

aten, prims = torch.ops.aten, torch.ops.prims
_COPIES = (aten.view.default, aten.reshape.default, aten.clone.default, prims.convert_element_type.default)
_SHAPE_ONLY = {
    "max_pool2d_with_indices_backward": 1,
    "avg_pool2d_backward": 1,
    "avg_pool3d_backward": 1,
    "_adaptive_avg_pool2d_backward": 1,
    "_adaptive_avg_pool3d_backward": 1,
}


def shape_only_operands(graph: fx.Graph) -> int:
    """Put stand-ins in place of operands of which only the shape is read; returns how many."""
    targets = {getattr(aten, name).default: i for name, i in _SHAPE_ONLY.items() if hasattr(aten, name)}
    count = 0
    for node in list(graph.nodes):
        index = targets.get(node.target) if node.op == "call_function" else None
        x: Any = None if index is None else node.args[index]
        if index is None or not is_tensor(x) or x.target is aten.expand.default:
            continue
        build = Builder(graph, node, backward=True)
        one = build.full([], 0, value(x).dtype, value(x).device)
        node.update_arg(index, build(aten.expand.default, one, build.sizes(x)))
        count += 1
    return count


def masks_behind_pools(graph: fx.Graph) -> int:
    """Move ReLUs' masks behind the max-pools that read the ReLUs; returns how many."""
    return sum(_moved(graph, node) for node in graph.find_nodes(op="call_function", target=aten.where.self))


def _moved(graph: fx.Graph, where: fx.Node) -> bool:
    closed: Any
    closed, zero, passed = where.args
    if not _is(closed, aten.le.Scalar) or closed.args[1] != 0 or not isinstance(passed, fx.Node) or not _zero(zero):
        return False
    relu, backward = _behind_aliases(closed.args[0]), _pool_backward(passed)
    if backward is None or not _is(relu, aten.relu.default):
        return False
    chain, gradient, map_ = backward
    if any(len(n.users) != 1 for n in chain) or not _is(map_, prims._low_memory_max_pool_offsets_to_indices.default):
        return False
    offsets = map_.args[0]
    pool = offsets.args[0] if _is(offsets, operator.getitem) else None
    if pool is None or _behind_aliases(pool.args[0]) is not relu or not is_tensor(gradient):
        return False
    pooled = next((u for u in pool.users if _is(u, operator.getitem) and u.args[1] == 0), None)
    if pooled is None or value(pooled).dtype != value(gradient).dtype:
        return False
    while value(gradient).shape != value(pooled).shape and _is(chain[-1], *_COPIES):
        gradient = chain.pop()  # as behind a pool that a flatten reads
    if value(gradient).shape != value(pooled).shape:
        return False
    build = Builder(graph, chain[-1], backward=True)
    masked = _masked(build, pooled, gradient)
    chain[-1].replace_input_with(gradient, masked)
    where.replace_all_uses_with(passed)
    graph.erase_node(where)
    return True


def _masked(build: Builder, pooled: fx.Node, gradient: fx.Node) -> fx.Node:
    closed = build(aten.le.Scalar, pooled, 0)
    zero = build.full([], 0.0, value(gradient).dtype, value(gradient).device)
    return build(aten.where.self, closed, zero, gradient)


def _pool_backward(node: fx.Node) -> tuple[list[fx.Node], Any, Any] | None:
    """(nodes from the result down to the one that reads the gradient, the gradient, the map) of a max-pool's backward,
    as one operator or as Inductor writes it with scatter_add, between changes of layout and, in bf16, casts to fp32 and
    back; None for anything else."""
    chain, node = _behind_copies(node)
    if node.target is aten.max_pool2d_with_indices_backward.default:
        return [*chain, node], node.args[0], node.args[-1]
    if not _is(node, aten.scatter_add.default):
        return None
    scatter: Any = node
    _, _, index, source = scatter.args
    copies, gradient = _behind_copies(source)
    _, map_ = _behind_copies(index)
    return ([*chain, scatter, *copies], gradient, map_) if copies else None


def _behind_copies(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """Views, copies and casts from a node on, and what they are of."""
    chain = []
    while _is(node, *_COPIES):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return chain, node


def _behind_aliases(node: Any) -> Any:
    while _is(node, aten.alias.default, aten.detach.default):
        node = node.args[0]
    return node


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _zero(node: Any) -> bool:
    return _is(node, aten.full.default, aten.scalar_tensor.default) and 0 in node.args


def rewritten(joint: fx.GraphModule, pools: bool = True) -> dict[str, int]:
    """Both rewrites, the second only if ``pools``; how often each was done, in words."""
    done = {
        "operands of which backward reads only the shape": shape_only_operands(joint.graph),
        "masks of ReLUs that a max-pool's output tells": masks_behind_pools(joint.graph) if pools else 0,
    }
    joint.graph.eliminate_dead_code()
    joint.graph.lint()
    joint.recompile()
    return done
