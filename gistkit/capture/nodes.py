"""The autograd graph after a recorded forward: which node and field holds each saved tensor, which tensors are weights.
A field is read as what its pack hook gave (``_raw_saved_x``): ``_saved_x`` would unpack it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
_GEOMETRY_AND_CASTS = frozenset(
    "TBackward0 ToCopyBackward0 ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 TransposeBackward0 "
    "PermuteBackward0 AliasBackward0".split()
)


def reachable(roots: Iterable[torch.Tensor], first: int = 0) -> Iterator[Any]:
    """Nodes reachable from the tensors' ``grad_fn``, each once; none made before the sequence number ``first``."""
    stack: list[Any] = [t.grad_fn for t in roots]
    seen: set[Any] = {None}
    while stack:
        node = stack.pop()
        if node not in seen and (is_accumulator(node) or node._sequence_nr() >= first):
            seen.add(node)
            yield node
            stack.extend(edge for edge, _ in node.next_functions)


def is_accumulator(node: Any) -> bool:
    """Whether a node stands for a leaf (``AccumulateGrad``)."""
    return hasattr(node, "variable") and node.name() == "torch::autograd::AccumulateGrad"


def saved_fields(node: Any, kind: type) -> list[tuple[str, Any]]:
    """(field, what the pack hook gave for it) of every tensor that a node saved under hooks that give a ``kind``."""
    found = []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                raw = getattr(node, name)
            except (AttributeError, RuntimeError):  # a field without a tensor
                continue
            field = "saved_tensors" if name == "_raw_saved_tensors" else name.removeprefix("_raw_saved_")
            packed = (saved.data for saved in (raw if isinstance(raw, tuple) else (raw,)))
            found.extend((field, item) for item in packed if isinstance(item, kind))
    return found


def is_weight(t: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or leads back to one through transposes, views and casts only,
    as autocast's narrow copies do: it lives anyway, so keeping it for backward costs nothing."""
    if is_parameter(t):
        return True
    node = t.grad_fn
    while node is not None and node.name() in _GEOMETRY_AND_CASTS:
        node = node.next_functions[0][0]
    return node is not None and _is_parameter(getattr(node, "variable", None))


def is_parameter(t: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    if type(t) is torch.nn.Parameter or (type(t) is not torch.Tensor and isinstance(t, torch.nn.Parameter)):
        return True
    return t._is_view() and _is_parameter(t._base)


def _is_parameter(t: torch.Tensor | None) -> bool:
    """isinstance, which Parameter's metaclass makes slow, without it for what is most frequent."""
    return t is not None and type(t) is not torch.Tensor and isinstance(t, torch.nn.Parameter)
