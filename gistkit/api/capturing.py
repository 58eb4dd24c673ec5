"""What `plan` and `profile` start from: the captured step of a model on a batch, and the device that is meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gistkit.capture import capture, check_rows, check_runs_in_python, rows, spread, uncollected
from gistkit.errors import CaptureError
from gistkit.ir import SavedGraph, goes_as
from gistkit.planning.cost import PRESETS, Hardware
from gistkit.planning.cost import hardware as find_hardware
from gistkit.planning.simulate import trains_batch_norm
from gistkit.profiling import all_tensors, card_at_hand


@unset_fake_temporarily()  # the caller's mode of fake tensors; a capture has its own
@uncollected()
def step_on(
    caller: str,
    model: torch.nn.Module,
    batch: tuple,
    loss_fn: Callable | None,
    which: Hardware | str | Path | None = None,
    hold_output: bool = True,
) -> tuple[SavedGraph, Hardware]:
    """The whole step of ``model`` on ``batch``, captured without arithmetic, and the hardware (:func:`hardware_of`).
    With a ``loss_fn`` the first item of the batch is the model's input (:func:`gistkit.capture.batch.spread`), the
    others are the loss's: ``loss_fn(model(batch[0]), *batch[1:])``. Raises TypeError, ValueError and CaptureError in
    the name of ``caller``."""
    _check(caller, model, batch, loss_fn)
    hardware = hardware_of(caller, model, batch, which)
    args, kwargs = (batch, {}) if loss_fn is None else spread(batch[0])
    targets = () if loss_fn is None else batch[1:]
    _check_call(caller, model, args, kwargs, loss_fn is not None)
    words = {"backward": True, "loss_fn": loss_fn, "targets": targets, "hold_output": hold_output}
    return capture(model, args, kwargs, **words), hardware


def may_be_cut(graph: SavedGraph, per_sub_batch_norm: object) -> bool:
    """Whether sub-batches of a captured step are offered: of several rows, and of batch norms in training mode only
    where the caller accepts other statistics."""
    return graph.batch > 1 and (bool(per_sub_batch_norm) or not trains_batch_norm(graph))


@unset_fake_temporarily()
@uncollected()
def with_least_rows(
    graph: SavedGraph, model: torch.nn.Module, batch: tuple, loss_fn: Callable | None, hold_output: bool = True
) -> SavedGraph:
    """The captured step with its ``least_rows`` and the step of these, ``small``: some models take another way for a
    single row, and one that is cut along anything but its rows for every part. Asked of 1, 2, 4 ... rows, until one
    goes as the batch does. A batch that needs a gradient is not cut: each part would bring one for all of it."""
    whole = replace(graph, least_rows=graph.batch)
    if any(t.requires_grad for t in all_tensors(batch)):
        return whole
    inputs, targets = (spread(batch[0]), batch[1:]) if loss_fn is not None else ((batch, {}), ())
    try:
        check_rows(inputs, graph.batch, "inputs")
        check_rows(targets, graph.batch, "targets")
    except (ValueError, TypeError):
        return whole
    least = 1
    while least < graph.batch:
        args, kwargs = rows(inputs, 0, least)
        words = {"backward": True, "loss_fn": loss_fn, "hold_output": hold_output}
        try:
            small = capture(model, args, kwargs, targets=rows(targets, 0, least), **words)
        except CaptureError:
            small = None
        if small is not None and goes_as(small, graph):
            return replace(graph, least_rows=least, small=small)
        least *= 2
    return whole


def _check(caller: str, model: torch.nn.Module, batch: tuple, loss_fn: Callable | None) -> None:
    check_runs_in_python(caller, model)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(
            f"{caller}: loss_fn must be callable, got {type(loss_fn).__name__}; pass a function of the model's output "
            "and the rest of the batch"
        )
    tensors = all_tensors(batch)
    if not tensors:
        raise ValueError(
            f"{caller}: batch must hold the model's inputs, got no tensor; pass them after the model, real, fake or on "
            'the meta device: torch.empty(64, 3, 224, 224, device="meta")'
        )
    first = next((t for t in tensors if t.dim() > 0), None)
    if first is not None and not len(first):
        raise ValueError(
            f"{caller}: batch must hold at least one row, got a tensor of shape {tuple(first.shape)}; pass a batch of "
            "the size that you train with"
        )


def _check_call(caller: str, model: torch.nn.Module, args: tuple, kwargs: dict, with_loss: bool) -> None:
    """Raise TypeError where the model's forward does not take what it would be called with."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is not Python's
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        what, remedy = "the batch", "without a loss_fn all of the batch goes there; pass loss_fn=..., which the items "
        remedy += "behind the first go to, or all that forward takes"
        if with_loss:
            what, remedy = "the first item of the batch", "pass several inputs as a tuple, named ones as a dict, as in "
            remedy += "(model, (x, mask), targets, loss_fn=...), or leave loss_fn out where forward computes the loss"
        raise TypeError(
            f"{caller}: {what} must be what {type(model).__name__}.forward takes, got {len(args) + len(kwargs)} "
            f"argument(s) for it ({error}); {remedy}; budget and loss_fn go by name"
        ) from None


def hardware_of(
    caller: str, model: torch.nn.Module, batch: tuple, which: Hardware | str | Path | None = None
) -> Hardware:
    """The given hardware, or that of the device that the model (without parameters: the batch) is on. A CUDA card has
    the rates of its last calibration here (``gistkit calibrate``), else those of its preset, else it is measured at the
    first call (a few seconds); none is planned at another card's. ``Plan.hardware`` names it, ``Plan.prediction.rates``
    says where its rates are from. Raises ValueError for what is on the meta device or on one without a preset, as no
    device is meant then, and for a card that cannot be measured."""
    if which is not None:
        return find_hardware(which)
    device = all_tensors(model, batch)[0].device
    if device.type == "cpu":
        return PRESETS["cpu"]
    if device.type == "cuda" and torch.cuda.is_available():
        return card_at_hand(device)
    raise ValueError(
        f"{caller}: hardware must be given for a model on device {str(device)!r}, which says nothing of the machine it "
        f"will train on; pass hardware='h200', another of {', '.join(PRESETS)}, or a file of `gistkit calibrate`"
    )
