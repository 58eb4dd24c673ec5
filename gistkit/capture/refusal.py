"""Why a step cannot be captured: what was running, what it raised, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gistkit.errors import CaptureError

_WITHOUT = "leave the plan out: gistkit.compress(model) records a real step"


@contextmanager
def running(part: str, model: torch.nn.Module) -> Iterator[None]:
    """Turn an exception of one part of the step (``forward``, ``loss_fn``, ``backward``) into a :class:`CaptureError`
    that names the part."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        name, on = type(model).__name__, "on a copy of it"
        what = f"the {part} of {name}"
        if part == "loss_fn":
            what, on = "loss_fn", f"on fake tensors, as a copy of {name} returned them"
        why = f"{type(error).__name__}: {error}{_remedy(part, model, error)}"
        raise CaptureError(f"{what} could not be captured {on}: {why}") from error


def _remedy(part: str, model: torch.nn.Module, error: Exception) -> str:
    if isinstance(error, DataDependentOutputException):
        return (
            f"; the {part} asks a tensor for its values (item(), float(), if), and here there are none: take that out "
            f"of it, or {_WITHOUT}"
        )
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"; the {part} makes a tensor whose size hangs on values (indexing by a bool tensor, nonzero(), unique()), "
            f"and here there are none: use torch.where, or the mask as a factor, or {_WITHOUT}"
        )
    if isinstance(error, NotImplementedError) and "Sparse" in str(error):
        modules = model.named_modules()
        sparse = [repr(name or type(m).__name__) for name, m in modules if getattr(m, "sparse", False) is True]
        remedy = f"make {', '.join(sparse)} with sparse=False" if sparse else "give dense tensors"
        return f"; a sparse tensor has no storage whose bytes could be planned: {remedy}, or {_WITHOUT}"
    if part == "loss_fn":
        return "; it is called as loss_fn(output, *targets), a plan's as loss_fn(model(batch[0]), *batch[1:])"
    return f"; mend it where the model alone raises it too, or {_WITHOUT}"
