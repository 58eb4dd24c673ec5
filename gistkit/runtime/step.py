"""step: forward and backward of one training step, in the sub-batches of the model's plan.

The batch is cut into nearly equal parts, whose gradients accumulate in ``.grad`` (moDNN, section IV-A). Up to the order
of summation the result is that of the whole batch: a sum's parts are added, a mean's are weighted by their rows. What
does not hold of the parts is what couples rows: the statistics of a batch norm. Dropout draws other masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gistkit.plan.plan import Plan
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.inputs import batch_size, check_rows, rows, spread

PER_SUB_BATCH = "per_sub_batch"
REDUCTIONS = ("mean", "sum")


def step(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    inputs: Any,
    targets: Any,
    *,
    sub_batches: int | None = None,
    reduction: str = "mean",
    batch_statistics: str | None = None,
) -> torch.Tensor:
    """Forward and backward of ``loss_fn(model(inputs), targets)``; gradients add to ``.grad``, as in PyTorch.

    ``inputs`` is a tensor, a tuple of positional arguments or a dict of named ones; it and ``targets`` may nest, and
    share their first dimension, the batch. ``sub_batches`` is by default that of the compressed model's plan, else 1; a
    batch of another size than the planned one is taken in parts of at most the planned rows. ``reduction`` says what
    ``loss_fn`` returns: the ``mean`` over the rows, or their ``sum``. ``batch_statistics="per_sub_batch"`` accepts that
    a batch norm in training mode sees the statistics of each part, and updates its running ones once a part.

    Returns the loss of the whole batch, detached. With one sub-batch every bit is that of the plain loop. A mean that
    is not over rows (class weights, ignored labels) cannot be put together from the parts' means: return the sum and
    divide by the weight of the whole batch. An error in a later part leaves the gradients of the earlier ones in
    ``.grad``.

    Raises ValueError or TypeError for arguments that make no sense, for tensors that cannot be cut and for batch norms
    whose statistics would change.
    """
    _check(model, loss_fn, sub_batches, reduction, batch_statistics)
    args, kwargs = spread(inputs)
    whole = (args, kwargs)
    batch = batch_size(whole)
    parts = _parts(model, batch, sub_batches)
    if parts == 1:
        return _part(model, loss_fn, whole, targets, None)
    check_rows(whole, batch, "inputs")
    check_rows(targets, batch, "targets")
    if batch_statistics is None:
        _refuse_batch_norm(model, parts)
    total: torch.Tensor | None = None
    for i in range(parts):
        start, stop = i * batch // parts, (i + 1) * batch // parts
        weight = (stop - start) / batch if reduction == "mean" else None
        loss = _part(model, loss_fn, rows(whole, start, stop), rows(targets, start, stop), weight)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def _part(
    model: torch.nn.Module, loss_fn: Callable, inputs: tuple[tuple, dict], targets: Any, weight: float | None
) -> torch.Tensor:
    """Forward and backward of one part; its share of the loss, detached."""
    args, kwargs = inputs
    loss = loss_fn(model(*args, **kwargs), targets)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"step: loss_fn must return a tensor with one element, got {got}; take its mean or sum")
    if weight is not None:
        loss = loss * weight
    loss.backward()
    return loss.detach()


def _parts(model: torch.nn.Module, batch: int, sub_batches: int | None) -> int:
    """Into how many parts the batch is cut: never more than it has rows."""
    if sub_batches is not None:
        return max(1, min(sub_batches, batch))
    plan = _plan_of(model)
    if plan is None or plan.sub_batches == 1:
        return 1
    planned = plan.settings.get("batch")
    if not planned or planned == batch:
        return max(1, min(plan.sub_batches, batch))
    return max(1, -(-batch // -(-planned // plan.sub_batches)))


def _plan_of(model: torch.nn.Module) -> Plan | None:
    stand_in = compressed_forward(model)
    return None if stand_in is None else stand_in.engine.plan


def _check(
    model: torch.nn.Module, loss_fn: Any, sub_batches: int | None, reduction: str, batch_statistics: str | None
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"step: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself")
    if not callable(loss_fn):
        raise TypeError(
            f"step: loss_fn must be callable, got {type(loss_fn).__name__}; the order is step(model, loss_fn, inputs, "
            "targets)"
        )
    if sub_batches is not None and (type(sub_batches) is not int or sub_batches < 1):
        raise ValueError(
            f"step: sub_batches must be None (as planned) or an int of at least 1, got {sub_batches!r}; leave it out"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"step: reduction must be {' or '.join(map(repr, REDUCTIONS))}, got {reduction!r}; it says what loss_fn "
            "returns for a batch"
        )
    if batch_statistics not in (None, PER_SUB_BATCH):
        raise ValueError(
            f"step: batch_statistics must be None or {PER_SUB_BATCH!r}, got {batch_statistics!r}; None refuses batch "
            "norms that would see other statistics"
        )


def _refuse_batch_norm(model: torch.nn.Module, parts: int) -> None:
    """Raise ValueError where a batch norm would normalise by the statistics of a part."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"step: a batch norm must see the whole batch, and {name or type(module).__name__!r} in training mode "
                f"would see {parts} sub-batches, each with its own statistics; accept that with "
                f"batch_statistics={PER_SUB_BATCH!r}, or pass sub_batches=1, or plan without sub-batches "
                '(fidelity="bitwise"), or put it into eval mode'
            )


__all__ = ["step"]
