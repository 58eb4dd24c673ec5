"""Which operators keep rows apart, and where the rows of their results lie; of any other nothing is known."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

aten = torch.ops.aten
IMAGES = (
    aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.avg_pool2d, aten.avg_pool3d,
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten.upsample_nearest2d, aten.upsample_bilinear2d,
    aten.native_group_norm,
)  # fmt: skip
"""Rows along the first dimension, before and after."""
PAIRED = (
    aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention, aten.bmm, aten.baddbmm,
)  # fmt: skip
"""Entry by entry of the first dimension of all operands."""
PRODUCTS = {aten.convolution: 0, aten.mm: 0, aten.addmm: 1, aten.embedding: 1}
"""Which operand may have rows, the others being weights."""
ALONG = (
    aten._softmax, aten._log_softmax, aten._safe_softmax, aten.mean, aten.sum, aten.var, aten.amax, aten.amin,
    aten.var_mean, aten.cumsum,
)  # fmt: skip
"""Along the dimensions that the second operand names."""
NORMS = (aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm)
SAME = (aten.clone, aten.detach, aten._to_copy, aten.alias, aten.lift_fresh, aten.native_dropout, aten.expand)
VIEWS = (aten.view, aten._unsafe_view, aten._reshape_alias)
PIECES = (aten.slice, aten.split, aten.split_with_sizes, aten.chunk)


def kept_along(
    op: Any, args: Sequence[Any], along: int, out: Any, rows: int, others: Sequence[torch.Tensor]
) -> int | None:
    """The dimension of the rows of what ``op`` made of operands whose ``rows`` rows lie along ``along``, but for
    ``others``, which have none; None where the rows may depend on each other."""
    x = args[0]
    if op in IMAGES or op in PAIRED:
        outer = all(t.dim() < x.dim() or t.shape[0] == 1 for t in others) if op in PAIRED else True
        return 0 if along == 0 and outer else None
    if op in PRODUCTS:
        return _product(op, args, along, others)
    if op in NORMS:  # one image of rows times channels: an instance norm
        return along if along == 1 or (along == 0 and not args[5]) else None
    if op is aten.native_layer_norm:
        return along if along < x.dim() - len(args[1]) else None
    if op in SAME:
        return along + out.dim() - x.dim() if isinstance(out, torch.Tensor) else along
    if op in VIEWS:
        return _viewed(x, along, out, rows)
    return _by_dimension(op, args, along, out)


def _product(op: Any, args: Sequence[Any], along: int, others: Sequence[torch.Tensor]) -> int | None:
    place = PRODUCTS[op]
    weights = [t for i, t in enumerate(args) if i != place and isinstance(t, torch.Tensor)]
    if not all(any(t is w for t in others) for w in weights):
        return None
    if op is aten.embedding:
        return along
    if op is aten.addmm and args[0].dim() > 1:
        return None
    return 0 if along == 0 else None


def _viewed(x: torch.Tensor, along: int, out: torch.Tensor, rows: int) -> int | None:
    """Rows that come first in memory stay so; behind other dimensions these must stay as they are."""
    if prod(x.shape[:along]) == 1:
        first = next(i for i, n in enumerate(out.shape) if n > 1)
        return first if out.shape[first] % rows == 0 else None
    return along if out.shape[: along + 1] == x.shape[: along + 1] else None


def _by_dimension(op: Any, args: Sequence[Any], along: int, out: Any) -> int | None:
    x = args[0]
    if op in ALONG:
        dims = _dims(args[1], x.dim()) if len(args) > 1 else range(x.dim())
        made = out[0] if isinstance(out, tuple) else out
        return None if along in dims else along - (sum(d < along for d in dims) if made.dim() < x.dim() else 0)
    if op in PIECES:
        dim = _dims(args[1 if op is aten.slice else 2] if len(args) > (1 if op is aten.slice else 2) else 0, x.dim())
        whole = isinstance(out, torch.Tensor) and out.shape == x.shape
        return along if along not in dim or whole else None
    if op in (aten.cat, aten.stack):
        (dim,) = _dims(args[1] if len(args) > 1 else 0, x[0].dim() + (op is aten.stack))
        if op is aten.stack:
            return along + (dim <= along)
        return along if dim != along else None
    if op in (aten.select, aten.unbind):
        (dim,) = _dims(args[1] if len(args) > 1 else 0, x.dim())
        return None if dim == along else along - (dim < along)
    return _moved(op, args, along)


def _moved(op: Any, args: Sequence[Any], along: int) -> int | None:
    x = args[0]
    order = list(range(x.dim()))
    if op is aten.permute:
        return _dims(args[1], x.dim()).index(along)
    if op in (aten.transpose, aten.t):
        a, b = _dims(list(args[1:3]), x.dim()) if op is aten.transpose else (0, x.dim() - 1)
        order[a], order[b] = order[b], order[a]
        return order.index(along)
    if op is aten.unsqueeze:
        return along + (_dims(args[1], x.dim() + 1)[0] <= along)
    if op is aten.squeeze:
        dims = _dims(args[1], x.dim()) if len(args) > 1 else order
        return along - sum(x.shape[d] == 1 for d in dims if d < along)
    return None


def _dims(named: Any, count: int) -> list[int]:
    """Dimensions as numbers from 0 on; None: all."""
    if named is None:
        return list(range(count))
    return [d % count for d in ([named] if isinstance(named, int) else named)]


__all__ = ["kept_along"]
