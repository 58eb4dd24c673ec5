"""The short way of a covered call that ran once: what the long way found out is not found out again.

A handler that has carried a call out as planned leaves a :class:`FastCall` at the call's number in the program. The
next forward runs it where the same function comes by at that number with operands of the same kind; for anything else
it answers None before it has touched anything, and the call goes the long way, whose word replaces it. So a fast call
decides nothing: its makers in :mod:`gistkit.runtime.calls.handlers` and, for additions,
:mod:`gistkit.runtime.calls.interpose` are the branches that it repeats.

What is asked anew each time is what a kind does not tell: who stashed a storage already, and what is watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from gistkit.capture import Add
from gistkit.nn.eligible import is_wrapped
from gistkit.runtime.calls.native import Hooks
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.program import Step

_transforms = torch._C._are_functorch_transforms_active
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_gradients = torch.is_grad_enabled
_Tensor, _strided = torch.Tensor, torch.strided


class FastCall(Protocol):
    """One covered call, ready to run for operands of the kind that it was made with."""

    def __call__(self, region: Region, hooks: Hooks, *operands: Any) -> torch.Tensor | None:
        """The call's result, of the operands of its :data:`gistkit.capture.calls.Bound` in order, under the region's
        hooks; None, and nothing done, where they are of another kind."""
        ...


Entry = tuple[Callable, Callable, FastCall, int]
"""What a program remembers of a covered call: its function, what binds its arguments, the fast call, its number among
all calls of the graph."""


class Kind:
    """All of a plain strided tensor that a handler decides by: dtype, device, geometry, whether it needs a gradient."""

    __slots__ = ("_device", "_dtype", "_needs_gradient", "_shape", "_stride")

    def __init__(self, x: torch.Tensor) -> None:
        self._dtype, self._device, self._needs_gradient = x.dtype, x.device, x.requires_grad
        self._shape, self._stride = x.shape, x.stride()

    def fits(self, x: Any) -> bool:
        """Whether x is such a tensor."""
        return (
            type(x) is _Tensor
            and x.dtype is self._dtype
            and x.layout is _strided
            and not x.is_nested
            and x.shape == self._shape
            and x.stride() == self._stride
            and x.requires_grad is self._needs_gradient
            and x.device == self._device
            and not x.is_neg()
            and not is_wrapped(x)
        )


def geometry(x: torch.Tensor) -> tuple:
    """How x sees its storage, as :meth:`gistkit.runtime.forward.provenance.Origins.key` has it; the same for tensors
    of one kind that begin where their storage does."""
    return x.dtype, x.shape, x.stride(), x.storage_offset()


class ParameterKind:
    """What a handler decides by of a parameter."""

    __slots__ = ("_dtype", "_needs_gradient")

    def __init__(self, p: torch.Tensor) -> None:
        self._dtype, self._needs_gradient = p.dtype, p.requires_grad

    def fits(self, *parameters: Any) -> bool:
        """Whether all of them are such parameters."""
        for p in parameters:
            if type(p) is not Parameter or p.dtype is not self._dtype or p.requires_grad is not self._needs_gradient:
                return False
        return True


class FastAdd:
    """An addition, which PyTorch carries out; it counts, and what it saves belongs to its number. Its last operands are
    the function and the arguments with which it was called."""

    def __init__(self, step: Step, b: Add) -> None:
        self._index, self._x, self._other = step.index, Kind(b.x), Kind(b.other)
        self._geometries = geometry(b.x), geometry(b.other)

    def __call__(
        self, region: Region, hooks: Hooks, x: Any, other: Any, alpha: Any, inplace: Any, *call: Any
    ) -> torch.Tensor | None:
        if not self._x.fits(x) or not self._other.fits(other):
            return None
        region.instead = self._index
        try:
            return summed(region, x, other, alpha, *call, *self._geometries)
        finally:
            region.instead = -1


def summed(
    region: Region, x: torch.Tensor, other: torch.Tensor, alpha: Any, func: Callable, args: tuple, kwargs: dict,
    *geometries: tuple,
) -> torch.Tensor:  # fmt: skip
    """An addition of plain tensors by PyTorch, remembered where recipes may name it; ``geometries``: those of both
    where they are known but for where they begin."""
    if type(alpha) not in (int, float) or alpha != 1:
        return func(*args, **kwargs)
    origins = region.origins
    keys = origins.key(x, *geometries[:1]), origins.key(other, *geometries[1:])
    y = func(*args, **kwargs)
    origins.summed(*keys, y)
    return y


def run_fast(region: Region, pack: Callable, func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of the covered call that comes now by its fast call; None where it goes the long way."""
    at = region.calls
    known: Entry | None = region.fast[at] if at < len(region.fast) else None
    if known is None or known[0] is not func:
        return None
    hooks = open_hooks(region, pack)
    if hooks is None:
        return None
    try:
        bound = known[1](*args, **kwargs)
    except (TypeError, IndexError):
        return None
    call = (func, args, kwargs) if type(bound) is Add else ()
    return _run(region, known, hooks, 0, *bound, *call)


def run_module(region: Region, pack: Callable, func: Callable, before: int, *operands: Any) -> torch.Tensor | None:
    """:func:`run_fast` of a call of PyTorch's own module, its operands in order; no addition. ``before``: how many
    calls, none of them covered, the module has the function modes see before it, which its caller makes if this one
    runs."""
    at = region.calls
    try:
        known: Entry | None = region.fast[at]
    except IndexError:
        return None
    if known is None or known[0] is not func:
        return None
    hooks = open_hooks(region, pack)
    return None if hooks is None else _run(region, known, hooks, before, *operands)


def _run(region: Region, known: Entry, hooks: Hooks, before: int, *operands: Any) -> torch.Tensor | None:
    """Run a fast call, counted as the long way counts it: by the region, and by the tape among all calls."""
    tape, at = region.tape, region.calls
    if tape is not None and not tape.passes(known[3], before):
        return None
    region.calls = at + 1
    y = known[2](region, hooks, *operands)
    if y is None:
        region.calls = at
        if tape is not None:
            tape.unpass(before)
    elif tape is not None:
        tape.passed()
    return y


def open_hooks(region: Region, pack: Callable) -> Hooks | None:
    """The region's hooks where a covered call counts now and nothing is watched."""
    if region.watch.items or not _gradients():
        return None
    top = _top_hooks(False)
    if top is None or top[0] is not pack or _transforms() or forward_ad._current_level >= 0:
        return None
    return top
