"""step: forward and backward of one training step, in the sub-batches of the model's plan.

The batch is cut into nearly equal parts, whose gradients accumulate in ``.grad`` (moDNN, section IV-A). Up to the order
of summation the result is that of the whole batch: a sum's parts are added, a mean's are weighted by their rows. What
couples rows does not hold of the parts: the statistics of a batch norm, a mean over the batch, a loss over pairs. So it
is asked first (:mod:`gistkit.runtime.step.norm_arithmetic`). Dropout draws other masks.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from gistkit.capture import batch_size, check_rows, left_behind, row_bytes, rows, spread
from gistkit.errors import PlanMismatchError
from gistkit.ir import Plan
from gistkit.planning.cost import CUDA_LIBRARIES_BYTES
from gistkit.planning.simulate import PER_SUB_BATCH, check_batch_statistics
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.program.match_plan import given_program, planned_rows
from gistkit.runtime.recompute.state import AUTOCAST_DEVICES
from gistkit.runtime.signature import signature
from gistkit.runtime.step.norm_arithmetic import REMEDIES, Cut, check_parts

REDUCTIONS = ("mean", "sum")
_asked: WeakKeyDictionary[torch.nn.Module, dict[tuple, int]] = WeakKeyDictionary()
"""Which kinds of steps of a model were asked whether they add up, with the rows of the smallest part: a cache, which
changes no answer and goes with the model. It is not in the model, whose pickles and copies would have it and would need
gistkit to load, nor in a compressed model's engine: a plain one, which has none, is taken in parts as well, and asking
takes several forwards."""


def step(
    model: torch.nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    inputs: Any,
    targets: Any,
    *,
    sub_batches: int | None = None,
    reduction: str = "mean",
    batch_statistics: str | None = None,
    check: bool = True,
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
    ``.grad``. A budget is for a step that begins with ``.grad`` None or is taken in sub-batches, which accumulate
    anyway; else plan with the bytes of all gradients as ``reserve``.

    With ``check``, before the first step of its kind in sub-batches (a model, its signature, how many parts, the loss
    function's code, reduction), and the first with a smaller part, forwards of a few rows without gradients, on a copy
    of the model, say whether the parts add up (docs/design.md); later steps are not asked and wait for nothing. Noticed
    are rows that change with the rows beside them or with their number, in two to twice a part's rows, and losses that
    are not the mean, or sum, of their parts, for every part's targets. Not noticed is what half the digits of the
    coarsest type in use do not show, what couples only more rows than those, or rows that are not alike where these
    are, what takes another way in a later step, and what backward alone couples. ``loss_fn`` and hooks are called for
    it, too. Where a plan's budget has no room for two rows, operators that may couple rows are refused, with the
    ``reserve`` to plan with. What cannot be asked (a model that cannot be copied, a forward that needs gradients) is a
    UserWarning behind the step.
    ``check=False`` takes the parts for what they give.

    Raises ValueError or TypeError for arguments that make no sense, for tensors that cannot be cut, for batch norms
    whose statistics would change and for rows or losses that do not add up; :class:`gistkit.PlanMismatchError` for
    inputs so much larger than the planned ones that they alone exceed the plan's budget and, with ``check``, for parts
    of fewer rows than planned under a budget that take another way through the model than the planned ones.
    """
    _check(model, loss_fn, sub_batches, reduction, batch_statistics, check)
    whole = spread(inputs)
    batch = batch_size(whole)
    parts = _parts(model, batch, sub_batches)
    if parts == 1:
        return _part(model, loss_fn, whole, targets, None)
    check_rows(whole, batch, "inputs")
    check_rows(targets, batch, "targets")
    _demand_room(model, batch, row_bytes((whole, targets)))
    if batch_statistics is None:
        _refuse_batch_norm(model, parts)
    cut = Cut(tuple(i * batch // parts for i in range(parts + 1)), reduction, batch_statistics is not None)
    why = _ask(model, loss_fn, whole, targets, cut) if check else ""
    total = _in_parts(model, loss_fn, whole, targets, cut)
    if why:
        warnings.warn(f"step: whether sub-batches add up was not found out: {why}; {REMEDIES}", stacklevel=2)
    return total


def _in_parts(
    model: torch.nn.Module, loss_fn: Callable, whole: tuple[tuple, dict], targets: Any, cut: Cut
) -> torch.Tensor:
    """Forward and backward of one part after the other; the loss of the whole batch, detached."""
    total: torch.Tensor | None = None
    for start, stop in itertools.pairwise(cut.bounds):
        weight = (stop - start) / cut.batch if cut.reduction == "mean" else None
        loss = _part(model, loss_fn, rows(whole, start, stop), rows(targets, start, stop), weight)
        total = loss if total is None else total + loss
    assert total is not None
    return total


def _ask(model: torch.nn.Module, loss_fn: Callable, whole: tuple[tuple, dict], targets: Any, cut: Cut) -> str:
    """:func:`gistkit.runtime.step.norm_arithmetic.check_parts`, once for every kind of step."""
    kind = (signature(model, *whole), len(cut.bounds), cut.reduction, cut.statistics, model.training, _code(loss_fn))
    asked = _asked.setdefault(model, {})
    if asked.get(kind, cut.least + 1) <= cut.least:
        return ""
    _demand_way(model, whole, cut)
    lazy = any(map(is_lazy, model.parameters()))
    why = check_parts(model, loss_fn, whole, targets, replace(cut, limit_bytes=_limit_bytes(model)))
    if not lazy:
        asked[kind] = cut.least
    return why


def _demand_way(model: torch.nn.Module, whole: tuple[tuple, dict], cut: Cut) -> None:
    """Raise PlanMismatchError where a plan with a budget is for larger parts than the smallest one, and this goes
    another way through the model than they do: a batch that does not divide into parts of the planned rows leaves fewer
    to some, however it is cut."""
    plan = _plan_of(model)
    planned = plan.contract.batch if plan is not None else 0
    if plan is None or plan.budget_bytes is None or not planned or cut.least >= planned // plan.sub_batches:
        return
    try:
        given_program(plan, model, *rows(whole, 0, cut.least))
    except PlanMismatchError as error:
        one = f"{cut.least} row{'' if cut.least == 1 else 's'}"
        remedy = (
            f"plan for a batch of {cut.batch}, leave batches of this size out, as drop_last=True does for an epoch's "
            "last one, or take the parts for what they give with check=False"
        )
        raise PlanMismatchError(error.expected, f"{error.got} in a part of {one} of {cut.batch}", remedy) from None


def _code(loss_fn: Any) -> Any:
    """What tells loss functions apart: a lambda in a loop is another function each time."""
    if isinstance(loss_fn, functools.partial):
        return _code(loss_fn.func)
    function = getattr(loss_fn, "__func__", loss_fn)
    return getattr(function, "__code__", type(loss_fn))


def _limit_bytes(model: torch.nn.Module) -> int | None:
    """What the plan's budget leaves to tensors."""
    plan = _plan_of(model)
    if plan is None or plan.budget_bytes is None:
        return None
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    return plan.budget_bytes - plan.contract.reserved_bytes - (CUDA_LIBRARIES_BYTES if on_gpu else 0)


def _demand_room(model: torch.nn.Module, batch: int, each_bytes: int) -> None:
    """Raise PlanMismatchError where a larger batch than the planned one, which is held whole, breaks the budget."""
    plan = _plan_of(model)
    planned = plan.contract.batch if plan is not None else 0
    if plan is None or plan.budget_bytes is None or not planned or not each_bytes:
        return
    room_rows = max(0, plan.budget_bytes - plan.peak_bytes) // each_bytes
    if batch > planned + room_rows:
        raise PlanMismatchError(
            f"a batch of at most {planned + room_rows} rows, which the plan's budget has room for",
            f"one of {batch} rows of {each_bytes} bytes",
            f"plan for a batch of {batch}, or call gistkit.step with {planned} rows at a time",
        )


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
    # the casts of weights go, which a loop that leaves its autocast context before backward lets go of here
    with left_behind() if any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)) else nullcontext():
        loss.backward()
    return loss.detach()


def _parts(model: torch.nn.Module, batch: int, sub_batches: int | None) -> int:
    """Into how many parts the batch is cut: never more than it has rows. The fewest of at most the planned rows, so
    that their rows are as many as they can be: some models take another way for few (:func:`_demand_way`)."""
    if sub_batches is not None:
        return max(1, min(sub_batches, batch))
    plan = _plan_of(model)
    if plan is None or plan.sub_batches == 1:
        return 1
    planned = plan.contract.batch
    if not planned or planned == batch:
        return max(1, min(plan.sub_batches, batch))
    return max(1, -(-batch // planned_rows(plan)))


def _plan_of(model: torch.nn.Module) -> Plan | None:
    stand_in = compressed_forward(model)
    return None if stand_in is None else stand_in.engine.plan


def _check(
    model: torch.nn.Module, loss_fn: Any, sub_batches: Any, reduction: str, batch_statistics: str | None, check: Any
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
    check_batch_statistics("step", batch_statistics)
    if type(check) is not bool:
        raise TypeError(f"step: check must be True or False, got {check!r}; False takes the parts for what they give")


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
