"""Trial steps: gradients of copies of a model, exact or with rounded stashes, and how far two sets of them differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from gistkit.capture import (
    loss_of,
    no_autocast_cache,
    on_copy,
    others_untouched,
    plain_copy,
    tensors_in,
    untouched_random_states,
)

Gradients = dict[str, torch.Tensor]
LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class GradientError:
    """Of one layer's gradient, weight and bias together: the norm of what is wrong over the norm of the exact one (inf
    where that is 0, nan where something is not finite), and the cosine between the two."""

    relative: float
    cosine: float


def gradient_error(exact: Gradients, found: Gradients) -> GradientError:
    """How far ``found`` is from ``exact``, whose names it must have; all gradients together. Waits for the device."""
    sums = []
    for name, e in exact.items():
        a, b = e.double(), found[name].double()
        sums.append(torch.stack(((b - a).square().sum(), a.square().sum(), b.square().sum(), (a * b).sum())))
    if not sums:
        return GradientError(0.0, 1.0)
    wrong, own, other, product = torch.stack([each.to(sums[0].device) for each in sums]).sum(0).tolist()
    relative = math.sqrt(wrong / own) if own else (math.inf if wrong else 0.0)
    if not wrong:
        return GradientError(0.0, 1.0)
    return GradientError(relative, product / math.sqrt(own * other) if own and other else 0.0)


class TrialSteps:
    """Steps of copies of a model on one batch, each from the same state. The model, its gradients, the inputs and all
    random states stay as they are. The loss is that of :func:`gistkit.capture.loss_of`."""

    def __init__(
        self, model: torch.nn.Module, inputs: tuple[tuple, dict], targets: tuple = (), loss_fn: LossFn | None = None
    ) -> None:
        self._model, self._inputs, self._targets, self._loss_fn = model, inputs, targets, loss_fn

    def gradients(self, forward: Callable[[torch.nn.Module, tuple, dict], Any] | None = None) -> Gradients:
        """By parameter, of one step; ``forward(copy, args, kwargs)`` runs the copy's forward, None as it is."""
        twin = plain_copy(self._model)
        twin.zero_grad(set_to_none=True)
        args, kwargs = tree_map_only(torch.Tensor, _apart, self._inputs)
        with untouched_random_states(), torch.enable_grad(), no_autocast_cache():
            out = twin(*args, **kwargs) if forward is None else forward(twin, args, kwargs)
            loss = loss_of(out, self._targets, on_copy(self._loss_fn, self._model, twin))
            # backward runs outside of the forward's autocast
            with others_untouched(loss, twin.parameters()), torch.autocast(loss.device.type, enabled=False):
                loss.backward()
        return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def _apart(t: torch.Tensor) -> torch.Tensor:
    """A copy of an input without its history, on which no gradient of the caller's can arrive."""
    made = t.detach().clone().requires_grad_(t.requires_grad)
    return made if t.is_leaf else made.clone()


def at_random(out: Any) -> torch.Tensor:
    """A loss of an output whose loss nobody knows: its own ``loss`` where it has one, else the sum of all its tensors
    times a cotangent of normal numbers, drawn with seed 0."""
    if isinstance(getattr(out, "loss", None), torch.Tensor):
        return out.loss
    drawn = torch.Generator().manual_seed(0)
    found = [t for t in tensors_in(out) if t.is_floating_point() and t.requires_grad]
    return loss_of([t * torch.randn(t.shape, generator=drawn).to(t) for t in found], (), None)
