"""A walk over the autograd graph after a recorded forward: which node and field holds each saved tensor.

Only nodes that saved something under the recorder's own hooks are asked for their fields: touching ``_saved_x`` unpacks
it, which inside a checkpoint would start the recomputation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Backward reads the shape of these and no more (checked in PyTorch's kernels and derivatives.yaml).
UNREAD = {
    ("MaxPool2DWithIndicesBackward0", "self"),
    ("MaxPool3DWithIndicesBackward0", "self"),
    ("AvgPool2DBackward0", "self"),
    ("AvgPool3DBackward0", "self"),
    ("AdaptiveAvgPool2DBackward0", "self"),
    ("AdaptiveAvgPool3DBackward0", "self"),
    ("NativeLayerNormBackward0", "bias"),
}


def nodes_from(roots: Iterable[torch.Tensor], first: int) -> list[Any]:
    """Nodes reachable from the tensors' ``grad_fn`` whose sequence number is at least ``first``, leaves left out."""
    stack: list[Any] = [t.grad_fn for t in roots]
    seen: set[Any] = set()
    nodes = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_accumulator(node) or node._sequence_nr() < first:
            continue
        nodes.append(node)
        stack.extend(edge for edge, _ in node.next_functions)
    return nodes


def is_accumulator(node: Any) -> bool:
    """Whether a node stands for a leaf (``AccumulateGrad``)."""
    return hasattr(node, "variable") and node.name() == "torch::autograd::AccumulateGrad"


def function_name(node: Any) -> str:
    """The name of the function behind a node: ``Mine`` for ``MineBackward``; ``unknown`` for None."""
    return "unknown" if node is None else re.sub(r"Backward\d*$", "", node.name())


def saved_fields(node: Any, opened: Callable[[], list]) -> list[tuple[str, Any]]:
    """(field, packed object) of every tensor that a node saved.

    ``opened`` empties and returns the list of objects that the unpack hook saw since it was last called.
    """
    opened()
    found = []
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except (AttributeError, RuntimeError):
                continue
            finally:
                packed = opened()
            field = name.removeprefix("_saved_")
            found.extend((field, item) for item in packed)
    return found


def backward_reads(node: str, field: str) -> bool:
    """Whether the backward of a node reads the values of one of its saved tensors, or its shape alone."""
    return (node, field) not in UNREAD
