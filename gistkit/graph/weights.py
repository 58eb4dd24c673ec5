"""Which tensors are weights: they live anyway, so keeping them for backward costs nothing."""

from __future__ import annotations

import torch

_GEOMETRY_AND_CASTS = frozenset(
    "TBackward0 ToCopyBackward0 ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 TransposeBackward0 "
    "PermuteBackward0 AliasBackward0".split()
)


def is_weight(t: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or leads back to one through transposes, views and casts only.

    The last catches autocast's narrow copies of weights. Reads no values and does not synchronise.
    """
    if isinstance(t, torch.nn.Parameter) or (t._is_view() and isinstance(t._base, torch.nn.Parameter)):
        return True
    node = t.grad_fn
    while node is not None and node.name() in _GEOMETRY_AND_CASTS:
        node = node.next_functions[0][0]
    return node is not None and isinstance(getattr(node, "variable", None), torch.nn.Parameter)
