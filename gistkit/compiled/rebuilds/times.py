"""Seconds that a step and its products take on a GPU, modelled: what rebuilds are held to a share of.

An operator of a library takes the longer of its bytes at the bandwidth and its operations at their rate, fused kernels
4.5 times the kept bytes: for an H100's step (bf16, batch 128) of ResNet-50 16.4 ms (measured 23.1), ViT-S 14.2 (16.5),
ConvNeXt-T 32.2 (32.1), EfficientNet-B0 15.2 (21.3).
"""

from __future__ import annotations

import operator

from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from gistkit.compiled import compat
from gistkit.compiled.rebuilds.rounding import in_memory
from gistkit.compiled.split import Pair, is_tensor, storage_bytes, storage_of, value

BYTES_A_S, OPERATIONS_A_S = 2.6e12, {2: 5.8e14, 4: 1.0e14}
"""What Triton's kernels and products reached in steps on an H100, products by the bytes of an element."""


def step_s(pair: Pair, kept_bytes: int) -> float:
    """Of forward and backward."""
    nodes = (n for module in (pair.forward, pair.backward) for n in module.graph.nodes if n.op == "call_function")
    made = sum(library_s(n) for n in nodes if n.target is not operator.getitem and in_memory(n))
    return made + 4.5 * kept_bytes / BYTES_A_S


def library_s(node: fx.Node) -> float:
    """Of an operator of a library."""
    made = [n for n in (node, *node.users) if is_tensor(n) and (n is node or n.target is operator.getitem)]
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))  # type: ignore[arg-type]
    args, kwargs = map_arg((node.args, node.kwargs), value)
    count = compat.hint(formula(*args, **kwargs, out_val=value(node))) if formula and made else 0
    rate = OPERATIONS_A_S.get(value(made[0]).element_size() if made else 4, OPERATIONS_A_S[4])
    moved = {storage_of(n): storage_bytes(n) for n in (*node.all_input_nodes, *made) if is_tensor(n)}
    return max(sum(moved.values()) / BYTES_A_S, count / rate)
