"""A loss with its gradients with respect to the results that it is made of, and whether those of parts add up.

Values do not tell enough: of logits that are all alike every weighted mean of cross entropies is the logarithm of their
number, whatever the weights. Nothing goes backward through the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gistkit.capture import tensors_in
from gistkit.runtime.step.deterministic_forward import GivenStatistics, steady

ROUNDINGS = 2
"""Of numbers below the smallest normal one: that of the gradients of both parts and of one."""


@dataclass(frozen=True)
class Made:
    """A loss, the roundoff of its type (0: none), and its gradients for the floating tensors of the results; none where
    these were not to be had."""

    loss: float
    unit: float
    grads: Sequence[torch.Tensor] = ()


def made_of(loss: Any, grads: Sequence[torch.Tensor] = ()) -> Made:
    """Synchronises."""
    rounds = isinstance(loss, torch.Tensor) and loss.is_floating_point()
    return Made(float(loss), torch.finfo(loss.dtype).eps / 2 if rounds else 0.0, grads)


class _Given(torch.autograd.Function):
    """Tensors as a forward hands them over: the loss may overwrite them, and what it gives them in backward is noted.
    They are no copies."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor], noted: list[torch.Tensor]) -> Any:
        ctx.noted = noted
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.noted.extend(grads)
        return None, None, None


def differentiated(loss_fn: Callable, out: Any, targets: Any, statistics: GivenStatistics) -> Made:
    """``loss_fn(out, targets)`` under :func:`gistkit.runtime.step.deterministic_forward.steady`, with gradients. It
    may overwrite both."""
    noted: list[torch.Tensor] = []
    anchor = torch.zeros((), requires_grad=True)
    with steady(statistics), torch.enable_grad():
        loss = loss_fn(_with_history(out, anchor, noted), targets)
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.numel() == 1:
            # no parameter that the loss reads is reached: only what leads to the results is gone through
            torch.autograd.grad(loss, anchor, allow_unused=True)
            loss = loss.detach()
    return made_of(loss, noted)


def _with_history(out: Any, anchor: torch.Tensor, noted: list[torch.Tensor]) -> Any:
    """A nested item of which the floating tensors, which stay its own, lead to ``anchor``, and backward into
    ``noted``."""
    found = {id(t): t for t in tensors_in(out)}
    floating = {key: t.detach() for key, t in found.items() if t.is_floating_point() or t.is_complex()}
    given = _Given.apply(anchor, list(floating.values()), noted) if floating else ()
    return copy.deepcopy(out, {**found, **dict(zip(floating, given, strict=True))})


def largest(made: Made) -> list[float]:
    """The largest finite value of each gradient. Synchronises."""
    return [_most(g.where(g.isfinite(), 0)) for g in made.grads]


def grads_apart(
    found: Sequence[Made], shares: Sequence[float], rows: Sequence[int], scales: Sequence[float] = ()
) -> float:
    """How far the gradients of two parts of so many rows, times their shares, are from those of both: the largest
    difference, relative to the largest value of its tensor, or to one of ``scales`` where that is larger. What is not
    finite, or has no rows, says nothing. Synchronises."""
    *parts, whole = (made.grads for made in found)
    if not all(parts) or not whole:
        return 0.0
    triples = zip(*parts, whole, scales or [0.0] * len(whole), strict=True)
    return max((_apart((a, b, both), shares, rows, scale) for a, b, both, scale in triples), default=0.0)


def _apart(grads: tuple[torch.Tensor, ...], shares: Sequence[float], rows: Sequence[int], scale: float) -> float:
    *parts, both = grads
    each = both.shape[0] // sum(rows) if both.dim() else 0
    shapes = [(n * each, *both.shape[1:]) for n in (*rows, sum(rows))]
    if not each or any(g.shape != shape for g, shape in zip(grads, shapes, strict=True)):
        return 0.0
    wide = torch.promote_types(both.dtype, torch.float32)
    off = 0.0
    for got, want, share in zip(both.split([len(g) for g in parts]), parts, shares, strict=True):
        got, want = got.to(wide), want.to(wide) * share
        finite = got.isfinite() & want.isfinite()
        scale = max(scale, *(_most(t.where(finite, 0)) for t in (got, want)))
        off = max(off, _most((got - want).where(finite, 0)))
    kind = torch.finfo(both.dtype)
    off -= ROUNDINGS * kind.smallest_normal * kind.eps  # below the smallest normal number the spacing is constant
    return max(off, 0.0) / scale if scale else 0.0


def _most(t: torch.Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


__all__ = ["Made", "differentiated", "grads_apart", "largest", "made_of"]
