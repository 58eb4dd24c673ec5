"""A model's parameters and buffers, as data, and which tensors are weights: they live anyway, so keeping them for
backward costs nothing."""

from __future__ import annotations

import torch

from gistkit.ir import StateTensor

_GEOMETRY_AND_CASTS = frozenset(
    "TBackward0 ToCopyBackward0 ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 TransposeBackward0 "
    "PermuteBackward0 AliasBackward0".split()
)


def is_weight(t: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or leads back to one through transposes, views and casts only.

    The last catches autocast's narrow copies of weights. Reads no values and does not synchronise.
    """
    if is_parameter(t):
        return True
    node = t.grad_fn
    while node is not None and node.name() in _GEOMETRY_AND_CASTS:
        node = node.next_functions[0][0]
    return node is not None and _is_parameter(getattr(node, "variable", None))


def is_parameter(t: torch.Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one."""
    return type(t) is torch.nn.Parameter or _is_parameter(t) or (t._is_view() and _is_parameter(t._base))


def _is_parameter(t: torch.Tensor | None) -> bool:
    """isinstance, which Parameter's metaclass makes slow, without it for what is most frequent."""
    return t is not None and type(t) is not torch.Tensor and isinstance(t, torch.nn.Parameter)


def state_of(model: torch.nn.Module) -> tuple[StateTensor, ...]:
    """A model's parameters and buffers, each object once, in the order of its modules. Touches no values."""
    named = (*model.named_parameters(), *model.named_buffers())
    return tuple(
        StateTensor(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.requires_grad) for name, t in named
    )
