"""What torch.autocast does to the operands of the covered ops.

PyTorch casts below its Python functions, inside the dispatcher; a Function that calls an op from its forward must have
its operands cast before. ``conv2d`` and ``linear`` run in the lower precision; ``batch_norm``, ``relu``,
``max_pool2d`` and ``dropout`` are on none of autocast's lists, on CPU and on CUDA, and take what they get.
"""

from __future__ import annotations

from typing import Any

import torch

LOWERED = frozenset({"conv2d", "linear"})
"""Covered ops that autocast runs in the lower precision."""

_CONVOLUTIONS = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}


def cast(op: str, device_type: str, *tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The operands of ``op`` as torch.autocast would hand them to it; unchanged outside autocast.

    Casts floating-point tensors of that device, float64 left alone, to the autocast dtype, differentiably; None stays.
    A fp32 leaf that requires gradients is cast once an autocast region, whoever uses it, for the cast comes from
    PyTorch's own cache: the gradients of its uses are added in the lower precision. The last is cast first, as
    PyTorch's builds do it: backward comes to the casts in the other order, and so frees narrow gradients in PyTorch's.
    Does not synchronise.
    """
    if op not in LOWERED or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple([_cast(x, dtype, device_type) for x in reversed(tensors)][::-1])


def _cast(x: torch.Tensor | None, dtype: torch.dtype, device_type: str) -> torch.Tensor | None:
    if x is None or not x.is_floating_point() or x.dtype in (dtype, torch.float64) or x.device.type != device_type:
        return x
    leaf = x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
    cacheable = leaf and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    shared = _shared_cast(x, dtype) if cacheable else None
    return x.to(dtype) if shared is None else shared


def _shared_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The cast of x in PyTorch's autocast cache, made where it is not there yet; None where no op gives it away.

    On CUDA autocast lowers einsum, of which a single operand comes back as a view: its base is the cast (13 us, 35 us
    the other way). Elsewhere an op saves its lowered operand for backward: a product with an empty partner.
    """
    if x.is_cuda:
        lowered = torch._C._VariableFunctions.einsum("...->...", (x,))._base  # type: ignore[attr-defined]
        if lowered is not None and lowered.dtype == dtype and lowered.shape == x.shape:
            return lowered
    saved: list[torch.Tensor] = []
    shape = {1: x.shape, 2: (x.shape[-1], 0)}.get(x.dim(), (0, *x.shape[1:]))
    partner = torch.empty(shape, dtype=dtype, device=x.device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        if x.dim() in _CONVOLUTIONS:
            _CONVOLUTIONS[x.dim()](partner, x)
        elif x.dim() in (1, 2):
            torch.matmul(x, partner)
    return next((t for t in saved if t is not partner and t.shape == x.shape and t.dtype == dtype), None)
