"""Products and convolutions that backward may compute anew: those that make at least twice the bytes that they read.

A 1x1 convolution from 64 to 256 channels moves 1.25 bytes for each byte that is not kept then, an activation's rebuild
2 and that of a residual sum 3. The library computes the same bits again from the same operands.
"""

from __future__ import annotations

import torch
from torch import fx

from gistkit.compiled.operators import convolving
from gistkit.compiled.split import is_tensor, storage_bytes, value

aten = torch.ops.aten
_ALIGNED = 8  # channels that are summed over are a multiple of it; a library pads others, which takes far longer


def grows(node: fx.Node) -> bool:
    """Whether a node is such a product. A convolution with a bias is none: Inductor adds the bias in other kernels."""
    if node.op != "call_function" or not is_tensor(node):
        return False
    if node.target is aten.convolution.default:
        _, weight, bias, *_, transposed, _, _ = node.args
        summed = None if bias is not None or transposed else value(weight).shape[1]  # type: ignore[arg-type]
    elif node.target in (aten.mm.default, aten.addmm.default):
        summed = value(node.args[-1]).shape[0]  # type: ignore[arg-type]
    else:
        return False
    read = sum(storage_bytes(n) for n in node.all_input_nodes if is_tensor(n))
    return isinstance(summed, int) and summed % _ALIGNED == 0 and 2 * read <= storage_bytes(node)


def again(node: fx.Node) -> None:
    """Have a copy of such a product be computed by the operator that backward has for it."""
    if node.target is aten.convolution.default:
        x, weight, _, stride, padding, dilation, _, _, groups = node.args
        node.target, node.args = convolving(), (x, weight, stride, padding, dilation, groups)
