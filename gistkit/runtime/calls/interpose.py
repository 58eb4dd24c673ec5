"""The function mode of a region: every torch function call of the forward passes here on its way to PyTorch.

Covered calls (relu, max_pool2d, conv2d, linear, batch_norm, dropout; as functions, methods or modules alike) go to
their fast call or their handler; an addition is counted and remembered, and runs as everything else does: as it is, its
saved tensors caught by the region's hooks. Calls under somebody
else's saved-tensor hooks (a checkpoint inside the model) and calls without gradients run untouched.
"""

from __future__ import annotations

import types
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gistkit.capture import COVERED, Add, MaxPool2d, bind, binder, is_counted, is_metadata, region_is_open
from gistkit.runtime.calls.fast import FastAdd, run_fast, summed
from gistkit.runtime.calls.handlers import HANDLERS, runs
from gistkit.runtime.forward.kept_ledger import OWNERS
from gistkit.runtime.forward.state import Region

_F = torch.nn.functional
# Their backward asks the saved input for its shape only.
UNREAD = frozenset(
    getattr(module, f"{kind}_pool{d}d{suffix}")
    for kind, module, suffix in (
        ("avg", _F, ""),
        ("adaptive_avg", _F, ""),
        ("max", _F, "_with_indices"),
        ("max", _F, ""),
    )
    for d in (1, 2, 3)
) | {torch.avg_pool1d, torch.adaptive_avg_pool1d, torch.max_pool1d, torch.max_pool3d}


def _opened(function: Any) -> Any:
    """A Python function of torch.nn.functional that runs its body whatever modes are on, where the function itself
    would hand the whole call over to them."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    opened = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


# Functions with such a pool inside, which PyTorch would not show.
COMPOSED = {f: _opened(f) for f in (_F.local_response_norm, _F.lp_pool1d, _F.lp_pool2d) if hasattr(f, "__code__")}

_tells_metadata = lru_cache(maxsize=1024)(is_metadata)


class Interposer(TorchFunctionMode):
    """Hands covered calls of the running forward to their handlers."""

    def __init__(self, region: Region, pack: Any) -> None:
        super().__init__()
        self.region = region
        self.pack = pack

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if torch.compiler.is_compiling():  # a compiled part of the model: its graph is the compiler's
            return func(*args, **kwargs)
        op = COVERED.get(func)
        if op is None:
            if _tells_metadata(func):
                return func(*args, **kwargs)
        elif op == "add" and self._adds_to_a_number(args):
            return func(*args, **kwargs)
        elif self.region.fast:
            result = run_fast(self.region, self.pack, func, args, kwargs)
            if result is not None:
                return result
        tape = self.region.tape
        if tape is None:
            return self._call(op, func, args, kwargs)
        tape.begin(func, args, kwargs)
        result = self._call(op, func, args, kwargs)
        tape.end(result)
        return result

    def _adds_to_a_number(self, args: tuple) -> bool:
        """Whether this adds to a batch norm's counter or the like: no covered call, no reader of what is watched."""
        region = self.region
        if region.watch.items or not args or type(args[0]) is not torch.Tensor or args[0].dim() != 0:
            return False
        return region.tape is None or region.tape.passes_by()

    def _call(self, op: str | None, func: Any, args: tuple, kwargs: dict) -> Any:
        region, bound = self.region, None
        if op is not None and region_is_open(self.pack):
            bound = bind(op, func, args, kwargs)
        # a pool is the one reader that a promise waits for
        if region.watch.items and type(bound) is not MaxPool2d:
            region.watch.touch(func, args, kwargs)
        if op is None or bound is None or not is_counted(bound):
            return self._uncovered(func, args, kwargs)
        step = region.next_step(op, bound)
        # what PyTorch's own op saves where it runs in the place of a covered call is as planned for that call
        region.instead = step.index
        try:
            handler = HANDLERS.get(op)
            if type(bound) is Add and type(bound.x) is type(bound.other) is torch.Tensor and runs(bound):
                region.learnt = FastAdd(step, bound)
                region.learn(step, func, binder(func))
                return summed(region, bound.x, bound.other, bound.alpha, func, args, kwargs)
            if handler is None or not runs(bound):
                if type(bound) is MaxPool2d:
                    region.watch.touch(func, args, kwargs)
                return self._uncovered(func, args, kwargs)
            result = handler(region, step, bound)
        finally:
            region.instead, region.unread = -1, False  # also where the call fails and the model goes on without it
        if op in OWNERS:
            region.account(step, result)
        if region.learnt is not None:
            region.learn(step, func, binder(func))
        return result

    def _uncovered(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in COMPOSED:
            with _Inside(self):
                return COMPOSED[func](*args, **kwargs)
        if func not in UNREAD:
            return func(*args, **kwargs)
        self.region.unread = True
        try:
            return func(*args, **kwargs)
        finally:
            self.region.unread = False


class _Inside(TorchFunctionMode):
    """The calls that a function of :data:`COMPOSED` makes: none of them is a covered call of the model."""

    def __init__(self, outer: Interposer) -> None:
        super().__init__()
        self._outer = outer

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self._outer._uncovered(func, args, kwargs or {})
