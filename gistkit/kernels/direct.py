"""The operators that a training step of many small layers calls most, past the dispatcher.

The dispatcher takes 3 us a call, and as much again goes into the flat views that the operators want. A dense tensor of
any shape is its own storage in storage order, so on a plain CUDA tensor that nothing watches the launcher is called as
it is. Everything else (the CPU's oracles, fake tensors, dispatch modes) goes to :mod:`gistkit.kernels.ops`.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from gistkit.kernels import ops
from gistkit.kernels.layout import flat, like

_modes = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]


def _is_plain(x: torch.Tensor) -> bool:
    return x.is_cuda and type(x) is torch.Tensor and not _modes()


@cache
def _launchers(family: str) -> Any:
    """Triton is imported at the first CUDA call and not before."""
    return importlib.import_module(f"gistkit.kernels.{family}")


def relu_mask1(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``ops.relu_mask1`` of a dense x of any shape, whose geometry relu(x) has."""
    if _is_plain(x):
        return _launchers("mask").relu_mask1_dense(x)
    values, bits = ops.relu_mask1(flat(x))
    # detached: a view made in a Function's forward would refuse to be modified in place later
    return like(values, x.shape, x.stride()).detach(), bits


def relu_mask1_(x: torch.Tensor) -> torch.Tensor:
    """``ops.relu_mask1_`` of a dense x of any shape."""
    if _is_plain(x):
        return _launchers("mask").relu_mask1_dense_(x)
    return ops.relu_mask1_(flat(x))


def mask1_backward(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``ops.mask1_backward`` of a dense gradient of any shape, whose geometry the result has."""
    if _is_plain(grad):
        return _launchers("mask").mask1_backward_dense(grad, mask)
    return like(ops.mask1_backward(flat(grad), mask), grad.shape, grad.stride())


def bn_rebuild(
    x: torch.Tensor,
    norm: list[torch.Tensor],
    form: str,
    plane: int,
    other: torch.Tensor | None,
    other_norm: list[torch.Tensor],
    other_form: str,
    relu: bool,
    out: torch.Tensor,
) -> None:
    """``ops.bn_rebuild`` of dense x, other and out of one geometry."""
    if _is_plain(x):
        _launchers("rebuild").bn_rebuild_dense(x, norm, form, plane, other, other_norm, other_form, relu, out)
    else:
        there = None if other is None else flat(other)
        ops.bn_rebuild(flat(x), norm, form, plane, there, other_norm, other_form, relu, flat(out))


__all__ = ["bn_rebuild", "mask1_backward", "relu_mask1", "relu_mask1_"]
