"""capture: the SavedGraph of a model's forward, or of a whole step, without running it on real data.

The forward runs on a deep copy with fake parameters, buffers and inputs (``FakeTensorMode``): no memory, no arithmetic,
and whatever the model does to itself it does to the copy. Random states are put back. What the copy cannot isolate are
globals and forward hooks of the user, so a model with hooks is refused and recorded on a real step instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from gistkit.capture.fakes import Fakes
from gistkit.capture.isolation import (
    fake_inputs,
    fake_twin,
    left_behind,
    no_autocast_cache,
    on_copy,
    others_untouched,
    plain_copy,
    uncollected,
    untouched_random_states,
)
from gistkit.capture.ledger import tensors_in
from gistkit.capture.mirrored import MirroredDevice, autocast_device
from gistkit.capture.padding import own_positions, without_idle_masks
from gistkit.capture.recorder import Recorder
from gistkit.capture.refusal import check_parts, check_runs_in_python, check_scripts, running
from gistkit.capture.step.tasks import StepBuilder
from gistkit.capture.step.trace import Tracer
from gistkit.errors import CaptureError
from gistkit.ir import SavedGraph

LossFn = Callable[..., torch.Tensor]


def capture(
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    *,
    fake: bool = True,
    backward: bool = False,
    on_cpu: bool = False,
    loss_fn: LossFn | None = None,
    targets: tuple = (),
    hold_output: bool = True,
) -> SavedGraph:
    """The calls and saved storages of ``model(*args, **kwargs)`` in its present mode.

    ``args`` and ``kwargs`` may hold real or fake tensors in any nesting. The model, its buffers, the gradients and
    every random state stay as they are. Of transformers' decoders with fewer heads of keys than of queries an
    ``attention_mask`` that hides nothing is left out, as these do on real values. With ``fake=False`` the copy really
    runs, which also measures densities (and waits for the device). Gradients are on during the run, autocast as the
    caller has it.

    ``backward`` runs the whole step on fake tensors, on the CPU's operators whatever device the model is on (also
    ``meta``, so model and batch may be far larger than the machine), and fills in the graph's ``tasks`` and ``blocks``.
    Its loss is ``loss_fn(output, *targets)``, without a ``loss_fn`` the output itself, its ``loss``, or the sum of all
    that it holds. The output is held until the step ends, as by a loop's variable, or with ``hold_output=False``
    until the loss is there, as in :func:`gistkit.step`; arguments that need gradients get them.

    ``on_cpu`` records the forward alone with the CPU's operators too, which on another device may keep other tensors:
    the graph is that of ``backward=True`` without tasks and blocks.

    Raises :class:`CaptureError`, its cause chained, where the copy cannot be made or fake tensors cannot go (values
    that decide the control flow or a size, operators without a fake implementation, sparse tensors, user hooks on
    modules, scripted and traced parts, in a whole step compiled ones); it says whether that was in the forward, the
    ``loss_fn`` or backward. TypeError or ValueError for arguments that make no sense, a model among them that is
    scripted, traced or compiled itself.
    """
    _check(model, args, kwargs, loss_fn, targets)
    if loss_fn is not None and not backward:
        raise ValueError(
            "capture: loss_fn needs backward=True, got backward=False; without a backward there is no loss"
        )
    if not fake and (backward or on_cpu):
        name = "backward" if backward else "on_cpu"
        raise ValueError(f"capture: {name}=True needs fake=True, got fake=False; a real step is recorded forward only")
    # the copy of a part that is compiled in place is not: it would run other operators than the part
    own = backward or on_cpu
    check_parts(model, compiled_too=own)
    if fake and not own and any(p.is_cuda for p in model.parameters()):
        check_scripts(model)
    args, kwargs = tuple(args), dict(kwargs or {})
    if fake:
        args, kwargs = without_idle_masks(model, args, kwargs)
    given = args, kwargs, tuple(targets)
    with running("forward", model), untouched_random_states(), torch.enable_grad():
        if not fake:
            with no_autocast_cache():  # casts of fake weights in the caller's cache are memory to nobody
                return _recorded(Recorder(twin := plain_copy(model)), twin, *given[:2])
        device_type = autocast_device([*model.parameters(), *model.buffers(), *tensors_in(given[:2])]) if own else None
        mode = Fakes(device_type is None)
        with uncollected(), MirroredDevice(device_type) if device_type else nullcontext():
            twin, given = fake_twin(model, mode, own), fake_inputs(given, mode, own)
            with mode, own_positions(given):
                if not backward:
                    return _recorded(Recorder(twin, source="fake", light=True), twin, *given[:2])
                own_loss = on_copy(loss_fn, model, twin)
                return _traced_step(twin, *given, loss_fn=own_loss, fakes=mode, hold_output=hold_output)


def _check(model: Any, args: Any, kwargs: Any, loss_fn: Any, targets: Any) -> None:
    check_runs_in_python("capture", model)
    for name, value in (("args", args), ("targets", targets)):
        if not isinstance(value, (tuple, list)):
            got, remedy = type(value).__name__, f"put it into one: {name}=(x,)"
            if isinstance(value, dict):
                remedy = "pass named ones as kwargs, behind args: (), {...}" if name == "args" else "pass its values"
            raise TypeError(f"capture: {name} must be a tuple, one item for each argument, got {got}; {remedy}")
    if kwargs is not None and not (isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs)):
        got = "a dict with other keys" if isinstance(kwargs, dict) else type(kwargs).__name__
        remedy = "positional arguments go into args: capture(model, (x, y))"
        raise TypeError(f"capture: kwargs must be a dict of the forward's arguments by name, got {got}; {remedy}")
    if loss_fn is not None and not callable(loss_fn):
        remedy = "pass a function of the model's output and the targets"
        raise TypeError(f"capture: loss_fn must be callable, got {type(loss_fn).__name__}; {remedy}")


def _recorded(recorder: Recorder, model: torch.nn.Module, args: tuple, kwargs: dict) -> SavedGraph:
    with recorder:
        out = model(*args, **kwargs)
    return recorder.finish(out)


def _traced_step(
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    targets: tuple,
    loss_fn: LossFn | None,
    fakes: Fakes,
    hold_output: bool,
) -> SavedGraph:
    """The graph of a fake model's step, in its FakeTensorMode. The step starts without gradients."""
    model.zero_grad(set_to_none=True)
    recorder = Recorder(model, source="fake", light=True)
    tracer, notes = Tracer(recorder, fakes), recorder.notes
    recorder.dropped, recorder.saved = tracer.drop, tracer.read
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
        if not hold_output:
            out = None
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
            tracer.finish({p.storage for p in notes.packs() if p.storage is not None})
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            batch = next((t.shape[0] for t in given if t.dim() > 0), 0)
            held = {t.untyped_storage()._cdata for t in tensors_in(out)}
            out = None  # what nothing else holds is gone for the builder
            return StepBuilder(graph, notes, tracer, gradients, held).build(batch)


def loss_of(out: Any, targets: tuple, loss_fn: LossFn | None) -> torch.Tensor:
    """The scalar that backward starts from: see :func:`capture`."""
    if loss_fn is not None:
        loss = loss_fn(out, *targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(f"loss_fn must return a tensor with one element, got {what}; take the mean or the sum")
        return loss
    for found in (getattr(out, "loss", None), out):
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return found
    parts = [t.sum() for t in tensors_in(out) if t.is_floating_point() and t.requires_grad]
    if not parts:
        raise CaptureError("the model returned nothing that needs a gradient; give a loss_fn, or train a parameter")
    return sum(parts[1:], parts[0])
