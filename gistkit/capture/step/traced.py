"""One forward and backward of a model on fake tensors, recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gistkit.capture.isolation.autocast_cache import left_behind
from gistkit.capture.isolation.closures import others_untouched
from gistkit.capture.ledger import tensors_in
from gistkit.capture.recorder import Recorder
from gistkit.capture.refusal import running
from gistkit.capture.step.tasks import with_step
from gistkit.capture.step.trace import Tracer
from gistkit.errors import CaptureError
from gistkit.ir import SavedGraph


def traced_step(
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    targets: tuple,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    on_cpu: bool = True,
) -> SavedGraph:
    """The graph of forward and backward of a model whose tensors, like all arguments, are fake ones on the CPU, whose
    operators the real ones run too if ``on_cpu``.

    To be called inside their FakeTensorMode. The step starts without gradients, whatever the model holds, and what the
    model returns is held until it ends, as ``out = model(x); loss = loss_fn(out); loss.backward()`` does. Raises
    :class:`CaptureError` where the loss needs no gradient.
    """
    model.zero_grad(set_to_none=True)
    recorder = Recorder(model, source="fake", light=True)
    tracer = Tracer(recorder, on_cpu)
    recorder.dropped = tracer.drop
    notes = recorder.notes
    given = list(tensors_in((args, kwargs, targets)))
    tracer.outside([*model.parameters(), *model.buffers(), *given])
    with tracer:
        with recorder:
            out = model(*args, **kwargs)
        tracer.active = False
        graph = recorder.finish(out)
        recorder.unpacked = tracer.stand_in
        tracer.active, tracer.phase = True, "loss"
        with running("loss_fn", model):
            loss = loss_of(out, targets, loss_fn)
        tracer.autocast_ends()
        if not loss.requires_grad:
            raise CaptureError(
                "the loss needs no gradient: no parameter requires one, or the loss does not depend on any; train one, "
                "or make the loss of what the model returns"
            )
        tracer.phase = "backward"
        with others_untouched(loss, [*model.parameters(), *given]), left_behind():
            with running("backward", model):
                loss.backward()
            tracer.finish(notes.held())
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            batch = next((t.shape[0] for t in given if t.dim() > 0), 0)
            return with_step(graph, notes, tracer, gradients, batch)


def loss_of(out: Any, targets: tuple, loss_fn: Callable[..., torch.Tensor] | None) -> torch.Tensor:
    """The scalar that backward starts from: see :func:`gistkit.capture.entry.capture`."""
    if loss_fn is not None:
        loss = loss_fn(out, *targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"loss_fn must return a tensor with one element, got {what}; take the mean or the sum")
        return loss
    found = getattr(out, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found
    if isinstance(out, torch.Tensor) and out.numel() == 1:
        return out
    parts = [t.sum() for t in tensors_in(out) if t.is_floating_point() and t.requires_grad]
    if not parts:
        raise CaptureError("the model returned nothing that needs a gradient; give a loss_fn, or train a parameter")
    return sum(parts[1:], parts[0])
