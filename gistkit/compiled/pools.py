"""Backward of max-pools, behind the cut: it reads the shape of a pool's input, and the ReLU that made the input reads
one bit an element of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from gistkit.compiled import compat
from gistkit.compiled.edit import Builder
from gistkit.compiled.split import Pair, is_tensor, value

aten = torch.ops.aten
_POOL = aten.max_pool2d_with_indices_backward.default
_ALIASES = (aten.alias.default, aten.detach.default)


def lay_out_stand_ins(pair: Pair) -> None:
    """Give the stand-ins of max-pools' inputs the strides that the inputs have. Inductor lays a pool's gradient out as
    the pool's input is, and copies it for the convolution behind where that is not channels_last."""
    for node in _pools(pair):
        x: Any = node.args[1]
        if x.target is aten.expand.default and _lies_last(pair, value(node)):
            stand_in(pair, node, value(node))


def only_signs_are_read(pair: Pair, node: fx.Node) -> bool:
    """Whether backward compares a saved tensor with 0 and otherwise reads its shape as that of a max-pool's input; the
    cut of torch 2.11 saves such a tensor in full."""
    compares = False
    stack = [pair.place(node)]
    while stack:
        x = stack.pop()
        for user in x.users:
            if user.target in _ALIASES:
                stack.append(user)
            elif user.target is aten.le.Scalar and user.args[1] == 0:
                compares = True
            elif user.target is not _POOL or user.args[1] is not x or user.all_input_nodes.count(x) > 1:
                return False
    return compares


def _pools(pair: Pair) -> list[fx.Node]:
    found = pair.backward.graph.find_nodes(op="call_function", target=_POOL)
    return [node for node in found if is_tensor(node.args[1])]


def stand_in(pair: Pair, node: fx.Node, like: torch.Tensor) -> bool:
    """Have a node of backward that reads only the shape of its second operand read a tensor laid out as ``like`` is,
    which no kernel writes; whether the sizes are known."""
    if not all(isinstance(d, int) for d in (*like.shape, *like.stride())):
        return False
    if _lies_last(pair, like):
        strides = torch.empty(like.shape, device="meta").to(memory_format=torch.channels_last).stride()
    else:
        strides = like.stride()
    build = Builder(pair.backward.graph, node, backward=True)
    words = {"dtype": like.dtype, "layout": torch.strided, "device": like.device, "pin_memory": False}
    node.update_arg(1, build(aten.empty_strided.default, list(like.shape), list(strides), **words))
    return True


def _lies_last(pair: Pair, x: torch.Tensor) -> bool:
    """Whether images lie in channels_last, as their strides and the graph's convolutions tell."""
    return x.dim() == 4 and (compat.prefers_channels_last(pair.forward) or x.stride(1) == 1)
