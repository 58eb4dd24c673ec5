"""A step's inputs as the caller holds them: nested tensors that share their first dimension, the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from gistkit.capture.calls import PLAIN


def spread(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """A model's inputs given as one item, as positional and named arguments: a tuple or list is several positional
    ones, a mapping with text keys named ones, anything else a single one."""
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return (), dict(inputs)
    return (inputs,), {}


def batch_size(item: Any) -> int:
    """The length of the first dimension of the first tensor that has one; 0 where none has."""
    tensors = (leaf for leaf in tree_flatten(item)[0] if isinstance(leaf, torch.Tensor))
    return next((t.shape[0] for t in tensors if t.dim() > 0), 0)


def check_rows(item: Any, batch: int, argument: str) -> None:
    """Raise ValueError or TypeError where a nested item cannot be cut into rows: tensors (but those without dimensions)
    must have ``batch`` rows, and nothing else but plain values may be among them."""
    for leaf in tree_flatten(item)[0]:
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() > 0 and leaf.shape[0] != batch:
                raise ValueError(
                    f"step: every tensor of {argument} must have the batch's {batch} rows to be cut up, got "
                    f"shape {tuple(leaf.shape)}; expand it along the batch, make it a buffer of the model, or pass "
                    "sub_batches=1"
                )
        elif not isinstance(leaf, PLAIN):
            raise TypeError(
                f"step: {argument} must hold tensors, numbers and texts in tuples, lists and dicts to be cut into "
                f"sub-batches, got a {type(leaf).__name__}; convert it, or pass sub_batches=1"
            )


def rows(item: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` of every tensor of a nested item, as views; what has no rows as it is."""
    return tree_map(lambda t: t[start:stop] if isinstance(t, torch.Tensor) and t.dim() > 0 else t, item)


def joined(item: Any, parts: Iterable[slice]) -> Any:
    """The rows of some parts, joined, of every tensor of a nested item, as copies; what has no rows as it is."""
    parts = list(parts)

    def join(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        return torch.cat([leaf[part] for part in parts]).detach()

    return tree_map(join, item)


def row_bytes(item: Any) -> int:
    """Bytes of one row of all tensors of a nested item."""
    tensors = (leaf for leaf in tree_flatten(item)[0] if isinstance(leaf, torch.Tensor))
    return sum(t[0].numel() * t.element_size() for t in tensors if t.dim() > 0 and len(t))
