"""Backward functions whose results cannot be differentiated again, and say so.

``torch.autograd.function.once_differentiable`` says so only where the gradient that comes in requires one. The gradient
of a plain sum does not, and the penalty of ``autograd.grad(model(x).sum(), x, create_graph=True)`` would be a constant:
a wrong gradient without a word. Here every result of a backward with ``create_graph=True`` refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

TWICE = (
    "trying to differentiate twice through an operation of gistkit, which keeps no more than its first backward needs "
    "(once_differentiable); call gistkit.restore(model) where gradients of gradients are wanted"
)


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """A Function's backward, run without gradients; under ``create_graph=True`` a backward through its results raises
    RuntimeError."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        again = torch.is_grad_enabled()
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not again:
            return results
        refuse = torch._C._functions.DelayedError(TWICE.encode(), len(results))  # type: ignore[attr-defined]
        return refuse(*(None if r is None else r.detach().requires_grad_() for r in results))

    return run
