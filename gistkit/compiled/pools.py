"""What backward of pools reads: only the shape, one bit an element, or offsets in windows.

Backward of a pool reads the shape of its input. A rewrite of the joint graph, before it is cut, changes no bit: a
stand-in of one element, expanded, takes the input's place. Behind the cut it gets the input's layout, and of a
max-pool's input that the cut saves all the same the ReLU that made it reads one bit an element."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from gistkit.compiled.edit import Builder, strides
from gistkit.compiled.operators import pooling
from gistkit.compiled.split import Pair, is_tensor, storage_bytes, value
from gistkit.planning.flow import BYTES_A_S

aten = torch.ops.aten
_POOL = aten.max_pool2d_with_indices_backward.default
_WINDOWS = 25  # over one element; of more Inductor compiles no gradient
_SPARED = 1.5
"""Times the time to read the gradient, for each window over an element: four fifths of the 1.8 and 1.9 measured, as
with all of it ResNet-50's step took 1.048 times plain's kernels, with these 1.024 (H200)."""
_SHAPE_ONLY = {_POOL, aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default,
               aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default}  # fmt: skip
"""Their second operand is read for its shape alone."""


def take_offsets(pair: Pair, same: bool) -> None:
    """Have the gradients of max-pools compare offsets in windows, as forward saves them, in place of indices that are
    computed of them: VGG-16's first takes 0.46 in place of 1.10 ms, ResNet-50's 0.15 in place of 0.73 (H200). ``same``:
    only where Inductor keeps the kernels that it has around them."""
    for node, indices, _ in _of_offsets(pair):
        gradient, x, *_, ceil, _ = node.args
        offsets, kernel, _, stride, padding, dilation = indices.args  # those of the gradient may be short, as stride=[]
        node.target = pooling()
        node.args = gradient, x, kernel, stride, padding, dilation, ceil, offsets, same


def spared_s(pair: Pair, same: bool, channels_last: bool) -> float:
    """Modelled seconds that :func:`take_offsets` spares of plain ``torch.compile``'s step; ``channels_last``: images
    will be. ResNet-50's 3x3 windows 0.58 ms, VGG-16's of 2x2 1.14 (H200)."""
    found = ((n, w) for n, _, w in _of_offsets(pair) if channels_last or not same or value(n).stride(1) == 1)
    return sum(_SPARED * windows * storage_bytes(node) for node, windows in found) / BYTES_A_S


def _of_offsets(pair: Pair) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """The gradients of max-pools that offsets in windows will do for, their indices, the windows over an element."""
    for node in pair.backward.graph.find_nodes(op="call_function", target=_POOL):
        indices: Any = node.args[-1]
        if indices.target is torch.ops.prims._low_memory_max_pool_offsets_to_indices.default:
            _, kernel, _, stride, padding, dilation = indices.args
            steps = [*zip(kernel, stride, padding, strict=True)]
            windows = prod(-(-k // s) for k, s, _ in steps)
            usual = value(node).dim() == 4 and dilation == [1, 1] and all(p >= k - s for k, s, p in steps)
            if usual and windows <= _WINDOWS:
                yield node, indices, windows


def lay_out_stand_ins(pair: Pair) -> None:
    """Give the stand-ins of pools' inputs the strides that the inputs have. Inductor lays a pool's gradient out as the
    pool's input is, and the convolution behind copies it where that is not channels_last."""
    for node in list(pair.backward.graph.nodes):
        if node.target in _SHAPE_ONLY and node.args[1].target is aten.expand.default and value(node).dim() == 4:
            layout = strides(pair, value(node))
            if layout and layout[1] == 1:
                stand_in(pair, node, value(node))


def only_signs_are_read(pair: Pair, node: fx.Node) -> bool:
    """Whether backward compares a saved tensor with 0 and otherwise reads its shape as that of a max-pool's input; the
    cut of torch 2.11 saves such a tensor in full."""
    compares, stack = False, [pair.place(node)]
    while stack:
        x = stack.pop()
        for user in x.users:
            if user.target in (aten.alias.default, aten.detach.default):
                stack.append(user)
            elif user.target is aten.le.Scalar and user.args[1] == 0:
                compares = True
            elif user.target is not _POOL or user.args[1] is not x or user.all_input_nodes.count(x) > 1:
                return False
    return compares


def stand_in(pair: Pair, node: fx.Node, like: torch.Tensor) -> bool:
    """Have a node of backward that reads only the shape of its second operand read a tensor laid out as ``like`` is,
    which no kernel writes; whether the sizes are known."""
    layout = strides(pair, like)
    if layout is None or not all(isinstance(d, int) for d in like.shape):
        return False
    build = Builder(pair.backward.graph, node, backward=True)
    node.update_arg(1, build(aten.empty_strided.default, [*like.shape], layout, dtype=like.dtype, device=like.device))
    return True


def rewritten(joint: fx.GraphModule) -> int:
    """Put stand-ins in place of operands of which only the shape is read; returns how many."""
    graph = joint.graph
    read = [(n, n.args[1]) for n in graph.nodes if n.op == "call_function" and n.target in _SHAPE_ONLY]
    read = [(node, x) for node, x in read if is_tensor(x) and x.target is not aten.expand.default]
    for node, x in read:
        build = Builder(graph, node, backward=True)
        one = build(aten.full.default, [], 0, dtype=value(x).dtype, device=value(x).device)
        node.update_arg(1, build(aten.expand.default, one, build.sizes(x)))
    graph.eliminate_dead_code()
    graph.lint()
    return len(read)
