"""compress and restore: a model's forward is replaced on the instance, and put back; saving: any region of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from gistkit.capture import STAND_IN, check_runs_in_python, hooks_are_active
from gistkit.errors import CompressError
from gistkit.formats import AUTO, MAX_ERROR, named
from gistkit.ir import Plan
from gistkit.planning.policies import check_lossy
from gistkit.runtime.assign import check_max_error
from gistkit.runtime.calls.interpose import interposed
from gistkit.runtime.engine import Engine
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.match_plan import check_plan
from gistkit.runtime.program.program import Settings
from gistkit.runtime.program.stats import StepStats, observe
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from gistkit.runtime.stand_in import CompressedForward, compressed_forward, name_of

Model = TypeVar("Model", bound=torch.nn.Module)
FIDELITIES = ("bitwise", "reassociated")


def compress(
    model: Model,
    plan: Plan | None = None,
    *,
    lossy: str | bool | None = None,
    fidelity: str = "bitwise",
    sparse: bool = True,
    min_gain: float = 0.02,
    max_error: float = MAX_ERROR,
    remeasure_every: int | None = None,
) -> Model:
    """Keeps what the model saves for backward in a smaller form; changes the model in place and returns it.

    Example::

        model = gistkit.compress(model)
        loss_fn(model(images), labels).backward()  # the training loop stays as it was

    ``plan``: a plan of :func:`gistkit.plan`. None: the first training forward is captured and planned by Gist's rules.
    Then loss, gradients, buffers and parameters equal plain PyTorch's bit for bit, under deterministic algorithms.

    ``lossy``: also rounds what is kept, to ``fp16``, ``fp10`` or ``fp8`` (Gist's formats), or with a power-of-two scale
    per 128 elements to ``fp16s``, ``fp10s`` or ``fp8s``, or at random and without bias to integers between the ends of
    blocks of 256, ``int4s`` or ``int2s``. True is ``int4s``, by the table of docs/accuracy.md.
    ``fidelity="reassociated"``: what ``torch.compile`` makes of the model may sum otherwise. ``sparse=False``: takes no
    form whose size depends on the values. A CUDA graph cannot hold those and keeps such storages as they are;
    without them it keeps, and rounds, what single steps do. ``min_gain``: a plan that saves at most this share of the
    kept bytes is not carried out; the model's own forward runs untouched, and the report says so. Unless it is 0 the
    smallest encodings are left out too, for the host's time: each saves at most a 256th of the kept bytes, and all of
    them 5 % of what the plan saves, and of what it keeps. A :class:`GraphedStep` makes them; a given plan is carried
    out whole.

    ``lossy="auto"``: each stash exact or in ``fp16``, ``fp8s``, ``int4s`` or ``int2s``, for the fewest bytes with a
    relative error of the gradients of at most ``max_error`` (:mod:`gistkit.runtime.assign`). The first training forward
    measures that in some four steps a stash, on copies of the model, which take the memory of a plain step. Of the loss
    it knows no more than the outputs: it takes their ``loss`` or, with cotangents of a fixed seed, a sum of them all.
    ``remeasure_every=N``: measures again after N forwards. Else the formats stay.

    Under a given plan every decision is the plan's. A step that is not the planned one raises
    :class:`PlanMismatchError`: another dataflow, other parameters or buffers; with a budget also other kernels or
    strides, frozen weights, larger inputs, more rows, another mode. With a budget each decision is carried out or
    refused with a :class:`PlanError`. A plan of policy ``plain`` decides nothing: PyTorch's own operators run.

    Parameters, state-dict keys and classes stay as they are. ``eval()`` and ``no_grad`` run the untouched code, except
    under a plan that was made of a model in ``eval()``. :func:`gistkit.restore` undoes it.

    Raises TypeError for what is no module or plan and for scripted, traced or compiled modules; ValueError for an
    unknown format or fidelity, a ``min_gain`` outside [0, 1), a ``max_error`` outside (0, 1) and a ``remeasure_every``
    without ``lossy="auto"``; CompressError where the model or a part of it is compressed already; in a first step
    under ``lossy="auto"`` CaptureError where it cannot be captured. Source: Gist (Jain et al., ISCA 2018).
    """
    check_runs_in_python("compress", model)
    lossy = named(lossy)
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
    check_max_error("compress", max_error)
    _check_remeasuring(remeasure_every, lossy, plan)
    if lossy != AUTO:
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
    settings = Settings(lossy, fidelity, min_gain, max_error, remeasure_every or 0, sparse)
    _stand_in(model, settings, plan).attach()
    return model


def _check_remeasuring(every: int | None, lossy: str | None, plan: Plan | None) -> None:
    if every is not None and (type(every) is not int or every < 1 or lossy != AUTO or plan is not None):
        raise ValueError(
            'compress: remeasure_every must be a number of forwards from 1 up, with lossy="auto" and no plan, got '
            f"{every!r} with lossy={lossy!r}{'' if plan is None else ' and a plan'}; leave it out"
        )


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


class Saved:
    """What a ``gistkit.saving`` block kept; ``stats`` is there when the block has ended."""

    def __init__(self) -> None:
        self.stats: StepStats | None = None


@contextmanager
def saving(lossy: str | None = None) -> Iterator[Saved]:
    """Keep the saved tensors of the forward code in this block encoded, each decided from the tensor alone.

    For code that is no single module. Without a plan nothing is known of later readers, so no ReLU runs in place, none
    gives its mask to a pool, and nothing is rebuilt; results are bit-exact unless ``lossy`` names a format (see
    :func:`gistkit.compress`): then what convolutions, linear layers and batch norms read is rounded. Backward may run
    inside or outside. Raises ValueError for an unknown format, CompressError inside another such block or where other
    saved-tensor hooks are active.
    """
    check_lossy(lossy)
    if hooks_are_active():
        raise CompressError(
            "saving: other saved-tensor hooks are active here and only the innermost pair applies; "
            "leave that block first"
        )
    state, saved = ForwardState(Settings(lossy), ExactPacker()), Saved()
    try:
        with interposed(state):
            yield saved
        state.finish()
        saved.stats = observe(state).stats()
    finally:
        state.clear()
