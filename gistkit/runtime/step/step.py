"""step: forward and backward of one training step, in the sub-batches of the model's plan.

The batch is cut into nearly equal parts, whose gradients accumulate in ``.grad`` (moDNN, section IV-A). Up to the order
of summation the result is that of the whole batch, provided that the model's rows do not depend on each other
(:mod:`gistkit.runtime.step.row_independence`), and that the loss is a mean or a sum, of which each part contributes its
own (:mod:`gistkit.runtime.step.losses`). Dropout draws other masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gistkit.capture import batch_size, check_rows, left_behind, row_bytes, rows, spread, tensors_in
from gistkit.errors import PlanMismatchError, renamed
from gistkit.ir import Plan
from gistkit.kernels import capturing
from gistkit.planning.cost import CUDA_LIBRARIES_BYTES
from gistkit.planning.simulate import check_per_sub_batch_norm
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.program.match_plan import given_program
from gistkit.runtime.signature import AUTOCAST_DEVICES, modules_in, signature
from gistkit.runtime.step.losses import ComparedLoss, known_share
from gistkit.runtime.step.row_independence import check_row_independence, tensors_of

REDUCTIONS = (None, "mean", "sum")
ABSENT: Any = object()
"""No targets, as of a model that gives its own loss; None is one."""
_checked: WeakKeyDictionary[torch.nn.Module, dict[tuple, int]] = WeakKeyDictionary()
"""For which kinds of forwards of a model rows are known to be independent, with the rows of the smallest part: a cache
that goes with the model, but not in its pickles and copies, which would need gistkit to load."""


@renamed(check="verify=", batch_statistics="per_sub_batch_norm=True")
def step(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    inputs: Any,
    targets: Any = ABSENT,
    *others: Any,
    sub_batches: int | None = None,
    reduction: str | None = None,
    per_sub_batch_norm: bool = False,
    verify: bool = True,
) -> torch.Tensor:
    """Forward and backward of ``loss_fn(model(inputs), targets, *others)``, in sub-batches where the plan has them.

    Gradients add to ``.grad``, as in PyTorch. Returns the loss of the whole batch, detached. With one sub-batch every
    bit is that of the plain loop. A model that gives its own loss, as those of transformers, needs no targets
    (``gistkit.step(model, lambda out: out.loss, batch)``); it cannot be cut into sub-batches.

    ``inputs``: a tensor, a tuple of positional arguments or a dict of named ones, nested at will; the first dimension
    of its tensors and of ``targets`` is the batch. ``sub_batches``: by default those of the compressed model's plan,
    else 1. A batch of another size is taken in parts of at most the planned rows. ``per_sub_batch_norm=True``: batch
    norms in training mode see the statistics of each part and update their running ones once a part.

    A budget is for a step that begins with ``.grad`` None, or that is taken in sub-batches, which accumulate anyway;
    otherwise plan with the bytes of all gradients as ``reserved_bytes``. An error in a later part leaves the gradients
    of the earlier parts in ``.grad``.

    **Losses.** Those of torch.nn.functional, ``functools.partial`` of them and their modules are put together by their
    own normalisers, so class weights, ignored labels and either ``reduction`` are right. Any other ``loss_fn`` is taken
    for the mean over the rows, or with ``reduction="sum"`` for their sum. It is called once more at the end of each
    step, on made-up results with the step's targets, and refused if values or gradients do not add up; clear ``.grad``
    then. This waits for the device. It does not see differences below half of float32's digits. A function that only
    reshapes results and targets for one of these losses, as those of language models do, is so called in its first step
    of a kind; later the parts' numbers of labels that are not ignored are compared.

    **Rows.** Before the first step of a kind in sub-batches, forwards of one and two rows, on a copy of the model and
    without gradients, tell whether its rows depend on each other; such a model is refused. It does not see what couples
    larger numbers of rows only, what half the digits of the coarsest dtype do not show, or what backward alone couples.

    ``verify=False`` leaves out both checks, as for a loss function that keeps a log.

    Raises ValueError or TypeError for arguments that make no sense, tensors that cannot be cut, batch norms whose
    statistics would change, rows that depend on each other, losses that do not add up, and checks for which a budget
    has no room; :class:`gistkit.PlanMismatchError` for inputs that alone exceed the plan's budget and, with ``verify``,
    for parts that take another way through the model than the planned ones. Source: moDNN's sub-batches (Chen et al.,
    DATE 2018).
    """
    check_step(model, loss_fn, sub_batches, reduction, per_sub_batch_norm, verify)
    whole = spread(inputs)
    batch = batch_size(whole)
    parts = _parts(model, batch, sub_batches)
    given, called = targets, loss_fn
    if targets is ABSENT or others:
        given = () if targets is ABSENT else (targets, *others)
        called = lambda out, several: loss_fn(out, *several)  # noqa: E731
    if parts == 1:
        return _part(model, called, whole, given)
    check_rows(whole, batch, "inputs")
    check_rows(given, batch, "targets")
    _demand_room(model, batch, row_bytes((whole, given)))
    if not per_sub_batch_norm:
        _refuse_batch_norm(model, parts)
    bounds = tuple(i * batch // parts for i in range(parts + 1))
    known = known_share(called, given, bounds, reduction)
    own = ComparedLoss(called, reduction or "mean", bounds, verify)
    if verify:
        _check_model(model, whole, given, bounds, per_sub_batch_norm)
    share = known or own.share
    total: Any = None
    for start, stop in itertools.pairwise(bounds):
        of_part = lambda out, t, fraction=(stop - start) / batch: share(out, t, fraction)  # noqa: E731
        loss = _part(model, of_part, rows(whole, start, stop), rows(given, start, stop))
        total = loss if total is None else total + loss
    if verify and known is None:
        own.compare(given, partial(_room_bytes, model, (whole, given)))
    return total


def _check_model(
    model: torch.nn.Module, whole: tuple[tuple, dict], targets: Any, bounds: tuple[int, ...], statistics: bool
) -> None:
    least = min(stop - start for start, stop in itertools.pairwise(bounds))
    kind = (signature(*whole), tuple([m.training for m in modules_in(model)]), statistics)
    checked = _checked.setdefault(model, {})
    if checked.get(kind, least + 1) <= least:
        return
    _demand_way(model, whole, bounds[-1], least)
    room_bytes = _room_bytes(model, (whole, targets))
    check_row_independence(model, whole, bounds[-1], least, statistics, room_bytes)
    checked[kind] = least


def _demand_way(model: torch.nn.Module, whole: tuple[tuple, dict], batch: int, least: int) -> None:
    """Raise PlanMismatchError where a part of ``least`` rows, fewer than planned, goes another way through the model
    than the planned ones: a batch that does not divide into parts of the planned rows leaves fewer to some."""
    plan = _plan_of(model)
    if plan is None or plan.budget is None or least >= plan.contract.batch // plan.sub_batches:
        return
    try:
        given_program(plan, model, *rows(whole, 0, least))
    except PlanMismatchError as error:
        got = f"{error.got} in a part of {least} row{'' if least == 1 else 's'} of {batch}"
        remedy = (
            f"plan for a batch of {batch}, leave batches of this size out, as drop_last=True does for an epoch's "
            "last one, or take the parts for what they give with verify=False"
        )
        raise PlanMismatchError(error.expected, got, remedy) from None


def _demand_room(model: torch.nn.Module, batch: int, each_bytes: int) -> None:
    plan = _plan_of(model)
    planned, budget = (0, None) if plan is None else (plan.contract.batch, plan.budget)
    if budget is None or not planned or not each_bytes:
        return
    most = planned + max(0, budget.left_bytes) // each_bytes
    if batch > most:
        raise PlanMismatchError(
            f"a batch of at most {most} rows, which the plan's budget has room for",
            f"one of {batch} rows of {each_bytes} bytes",
            f"plan for a batch of {batch}, or call gistkit.step with {planned} rows at a time",
        )


def _room_bytes(model: torch.nn.Module, given: Any) -> int | None:
    """What the plan's budget leaves beside what is there; None without a budget."""
    plan = _plan_of(model)
    budget = None if plan is None else plan.budget
    if budget is None:
        return None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    there = {t.untyped_storage()._cdata: t for t in tensors_in([tensors_of(model), gradients, given])}
    taken_bytes = budget.reserved_bytes + sum(t.untyped_storage().nbytes() for t in there.values())
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    return budget.total_bytes - taken_bytes - (CUDA_LIBRARIES_BYTES if on_gpu else 0)


def _part(model: torch.nn.Module, loss_fn: Callable, inputs: tuple[tuple, dict], targets: Any) -> torch.Tensor:
    args, kwargs = inputs
    loss = loss_fn(model(*args, **kwargs), targets)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"step: loss_fn must return a tensor with one element, got {got}; take its mean or sum")
    # the casts of weights go, which a loop that leaves its autocast context before backward lets go of here
    autocast = left_behind() if any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)) else nullcontext()
    # no thread of its own for the card, where Python would run; a graph is captured as PyTorch does it
    with autocast, nullcontext() if capturing() else torch.autograd.set_multithreading_enabled(False):
        loss.backward()
    return loss.detach()


def _parts(model: torch.nn.Module, batch: int, sub_batches: int | None) -> int:
    """Into how many parts the batch is cut: the fewest of at most the planned rows, as some models take another way for
    few (:func:`_demand_way`), and never more than it has rows."""
    if sub_batches is not None:
        return max(1, min(sub_batches, batch))
    plan = _plan_of(model)
    if plan is None or plan.sub_batches == 1:
        return 1
    planned = plan.contract.batch
    if not planned or planned == batch:
        return max(1, min(plan.sub_batches, batch))
    return max(1, -(-batch // plan.planned_rows))


def _plan_of(model: torch.nn.Module) -> Plan | None:
    stand_in = compressed_forward(model)
    return None if stand_in is None else stand_in.engine.plan


def check_step(
    model: torch.nn.Module,
    loss_fn: Any,
    sub_batches: Any,
    reduction: Any,
    per_sub_batch_norm: Any,
    verify: Any,
    name: str = "step",
) -> None:
    """Raise TypeError or ValueError, in the name of ``name``, for arguments that make no sense."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself")
    if not callable(loss_fn):
        raise TypeError(
            f"{name}: loss_fn must be callable, got {type(loss_fn).__name__}; the order is {name}(model, loss_fn, ...)"
        )
    if sub_batches is not None and (type(sub_batches) is not int or sub_batches < 1):
        raise ValueError(
            f"{name}: sub_batches must be None (as planned) or an int of at least 1, got {sub_batches!r}; leave it out"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{name}: reduction must be None, 'mean' or 'sum', got {reduction!r}; it says what a loss_fn of your own "
            "returns for a batch"
        )
    check_per_sub_batch_norm(name, per_sub_batch_norm)
    if type(verify) is not bool:
        raise TypeError(
            f"{name}: verify must be True or False, got {verify!r}; False takes the parts for what they give"
        )


def _refuse_batch_norm(model: torch.nn.Module, parts: int) -> None:
    if not any([isinstance(module, _BatchNorm) for module in modules_in(model)]):
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"step: a batch norm must see the whole batch, and {name or type(module).__name__!r} in training mode "
                f"would see {parts} sub-batches, each with its own statistics; accept that with "
                "per_sub_batch_norm=True, or pass sub_batches=1, or plan without sub-batches "
                '(fidelity="bitwise"), or put it into eval mode'
            )
