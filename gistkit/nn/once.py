"""Backward functions whose results cannot be differentiated again, and say so.

``torch.autograd.function.once_differentiable`` refuses only where the incoming gradient requires one, and not on the
way to any leaf: the penalty of ``autograd.grad(model(x).sum(), x, create_graph=True)`` would be a constant, and
``autograd.functional.hessian`` would return zeros. Here every result of a backward with ``create_graph=True`` refuses.
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
    """A Function's backward; a backward through its results raises RuntimeError."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> tuple:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        behind = [t for t in (*grads, *_leaves(ctx)) if t is not None]
        refuse = torch._C._functions.DelayedError(TWICE.encode(), len(results) + len(behind))  # type: ignore[attr-defined]
        return refuse(*(None if r is None else r.detach() for r in results), *behind)[: len(results)]

    return run


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without what its Python half does for function transforms (4 us a call), which
    :func:`gistkit.nn.eligible.covered` operands never meet."""
    if torch.compiler.is_compiling():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _leaves(node: Any) -> list[torch.Tensor]:
    stack, seen, leaves = [node], {node}, []
    while stack:
        for edge, _ in stack.pop().next_functions:
            if edge is None or edge in seen:
                continue
            seen.add(edge)
            stack.append(edge)
            if isinstance(getattr(edge, "variable", None), torch.Tensor):
                leaves.append(edge.variable)
    return leaves
