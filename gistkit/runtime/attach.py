"""compress and restore: a model's forward is replaced on the instance, and put back."""

from __future__ import annotations

from typing import TypeVar

import torch

from gistkit.capture import STAND_IN, check_runs_in_python
from gistkit.errors import CompressError
from gistkit.ir import Plan
from gistkit.planning.policies import check_lossy
from gistkit.runtime.engine import Engine
from gistkit.runtime.program.match_plan import check_plan
from gistkit.runtime.program.settings import Settings
from gistkit.runtime.stand_in import CompressedForward, compressed_forward, name_of

Model = TypeVar("Model", bound=torch.nn.Module)
FIDELITIES = ("bitwise", "reassociated")
SLICES = 8


def compress(
    model: Model,
    plan: Plan | None = None,
    *,
    lossy: str | None = None,
    fidelity: str = "bitwise",
    min_gain: float = 0.02,
) -> Model:
    """Make the model keep its saved tensors encoded; returns the same object.

    Without a plan the first training forward is captured and planned by the Gist policy: bit-exact by default (loss,
    gradients, buffers and parameters equal plain PyTorch's bit for bit under deterministic algorithms). ``lossy`` adds
    delayed precision reduction in a format of ``fp16``, ``fp10``, ``fp8`` (unscaled, the paper's) or those with ``s``
    (a scale per 128 elements) or ``t`` (per tensor). ``fidelity="reassociated"`` lets weight gradients be summed in
    batch slices. ``min_gain`` is the share of the kept bytes that such a plan must save: where it saves no more, the
    model's own forward runs, untouched, with a note in the report. Under a ``plan`` of :func:`gistkit.plan` every
    decision is the plan's, its format and its slices too, and a step that is not the planned one is a
    :class:`PlanMismatchError`: another dataflow or other parameters and buffers; with a budget also other kernels or
    strides, frozen weights, larger inputs, more rows, another mode. What a plan with a budget decides is carried out or
    refused with a :class:`PlanError`; under one of policy ``plain``, which decides nothing, PyTorch's own operators
    run. Parameters, state-dict keys and classes stay as they are; ``eval()`` and ``no_grad`` run untouched code, but
    for a plan that was made of a model in ``eval()``: it is carried out in that mode, wherever gradients are on.

    Raises TypeError for what is not a module or a plan, and for a scripted, traced or compiled module, ValueError for
    an unknown format or fidelity or min_gain out of range, CompressError where the model or a part of it is compressed
    already. Paper: Gist (Jain et al., ISCA 2018).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"compress: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself"
        )
    check_runs_in_python("compress", model)
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"compress: plan must be a gistkit.Plan or None, got {type(plan).__name__}; use Plan.from_json")
    if fidelity not in FIDELITIES:
        raise ValueError(
            f"compress: fidelity must be one of {', '.join(FIDELITIES)}, got {fidelity!r}; bitwise changes no bit of "
            "the result"
        )
    if type(min_gain) not in (int, float) or not 0 <= min_gain < 1:
        raise ValueError(
            f"compress: min_gain must be a share from 0 up to, but not, 1, got {min_gain!r}; 0.02 is the default"
        )
    check_lossy(lossy)
    for name, part in model.named_modules():
        if compressed_forward(part) is not None:
            what = f"its submodule {name!r} is" if name else "it is"
            raise CompressError(f"compress: the model cannot be compressed: {what} compressed already; "
                                "call gistkit.restore on that first")  # fmt: skip
        if isinstance(part, torch.nn.DataParallel) and len(part.device_ids) > 1:
            raise CompressError(
                "compress: the model must run in one thread on one device, got DataParallel over devices "
                f"{list(part.device_ids)}; use torch.nn.parallel.DistributedDataParallel, one process a device"
            )
    if plan is not None:
        lossy = check_plan(plan, lossy)
    slices = SLICES if fidelity == "reassociated" else 1
    _stand_in(model, Settings(lossy, fidelity, slices, min_gain), plan).attach()
    return model


def _stand_in(model: torch.nn.Module, settings: Settings, plan: Plan | None) -> CompressedForward:
    """A new stand-in, or the one that :func:`restore` left inside somebody's wrapper."""
    left = vars(model).get(STAND_IN)
    if left is not None and left.is_reached:
        left.engine = Engine(settings, plan)
        return left
    if left is not None:
        left.detach()
    return CompressedForward(model, settings, plan, vars(model).get("forward"))


def restore(model: Model) -> Model:
    """Undo :func:`compress`; returns the same object. Where somebody has wrapped the forward since (accelerate's mixed
    precision), their wrapper stays, without compression inside.

    Raises CompressError where the model is not compressed, and where a function stands in its forward that does not say
    what it wraps (``functools.wraps``).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"restore: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself")
    stand_in = compressed_forward(model)
    if stand_in is None:
        raise CompressError("restore: the model is not compressed; call gistkit.compress(model) first")
    if not stand_in.is_reached:
        raise CompressError(
            f"restore: {name_of(vars(model)['forward'])} stands in the model's forward and does not say what it wraps; "
            "take it off first, the last wrapper before the others, then call gistkit.restore(model)"
        )
    stand_in.detach()
    return model
