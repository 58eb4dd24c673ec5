"""What torch.autocast does to the operands of the covered ops.

PyTorch casts below its Python functions, inside the dispatcher; a Function that calls an op from its forward must have
its operands cast before. ``conv2d`` and ``linear`` run in the lower precision; ``batch_norm``, ``relu``,
``max_pool2d`` and ``dropout`` are on none of autocast's lists, on CPU and on CUDA, and take what they get.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

LOWERED = frozenset({"conv2d", "linear"})
"""Covered ops that autocast runs in the lower precision."""

Cache = MutableMapping[Any, tuple[torch.Tensor, torch.Tensor]]


def cast(op: str, device_type: str, *tensors: torch.Tensor | None, cache: Cache | None = None) -> tuple[Any, ...]:
    """The operands of ``op`` as torch.autocast would hand them to it; unchanged outside autocast.

    Casts floating-point tensors of that device, float64 left alone, to the autocast dtype, differentiably; None stays.
    ``cache``, a dict that lives as long as one autocast region, holds the casts of fp32 leaves that require gradients,
    as PyTorch's own cache does: a weight used twice is cast once, and its two gradients are added in the lower
    precision. Does not synchronise.
    """
    if op not in LOWERED or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(_cast(x, dtype, device_type, cache) for x in tensors)


def _cast(x: torch.Tensor | None, dtype: torch.dtype, device_type: str, cache: Cache | None) -> torch.Tensor | None:
    if x is None or not x.is_floating_point() or x.dtype in (dtype, torch.float64) or x.device.type != device_type:
        return x
    if cache is None or not _cacheable(x):
        return x.to(dtype)
    key = (id(x), dtype, torch.is_grad_enabled())
    if key not in cache:
        # x rides along so that its id stays its own
        cache[key] = (x, x.to(dtype))
    return cache[key][1]


def _cacheable(x: torch.Tensor) -> bool:
    leaf = x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
    return leaf and torch.is_autocast_cache_enabled()


@contextmanager
def disabled(device_type: str) -> Iterator[None]:
    """No autocast within; costs next to nothing where none is on."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, True)
