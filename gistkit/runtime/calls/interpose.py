"""The function mode of a forward: every torch function call passes here on its way to PyTorch.

Covered calls (relu, max_pool2d, conv2d, linear, batch_norm, dropout, add; as functions, methods or modules alike) are
run as planned. Everything else runs as it is, under the forward's saved-tensor hooks where it saves something that is
kept in another form. Calls under somebody else's saved-tensor hooks (a checkpoint inside the model) and calls without
gradients run untouched.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gistkit.capture import COVERED, bind, hooks_are_active, is_counted, is_metadata
from gistkit.runtime.calls.hooks import catches, caught, pack, top_hooks
from gistkit.runtime.calls.run import next_call, run
from gistkit.runtime.forward.state import ForwardState

_F = torch.nn.functional
_POOLS = ("avg_pool{}d", "adaptive_avg_pool{}d", "max_pool{}d_with_indices", "max_pool{}d")
# Their backward asks the saved input for its shape only.
UNREAD = frozenset(getattr(_F, name.format(d)) for name in _POOLS for d in (1, 2, 3))
UNREAD |= {torch.avg_pool1d, torch.adaptive_avg_pool1d, torch.max_pool1d, torch.max_pool3d}


def _opened(function: Any) -> Any:
    """A Python function of torch.nn.functional that runs its body under a function mode, to which the function itself
    would hand over the whole call."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    opened = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


# Functions with such a pool inside, which PyTorch would not show.
COMPOSED = {f: _opened(f) for f in (_F.local_response_norm, _F.lp_pool1d, _F.lp_pool2d) if hasattr(f, "__code__")}

_is_compiling = torch.compiler.is_compiling
_tells_metadata = lru_cache(maxsize=1024)(is_metadata)


class Interposer(TorchFunctionMode):
    """Runs the covered calls of the running forward as planned."""

    def __init__(self, state: ForwardState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if _is_compiling():  # a compiled part of the model: its graph is the compiler's
            return func(*args, **kwargs)
        op, state = COVERED.get(func), self.state
        if op is None:
            if _tells_metadata(func):
                return func(*args, **kwargs)
        elif op == "add" and state.tape is None and args and type(args[0]) is torch.Tensor and args[0].dim() == 0:
            return func(*args, **kwargs)  # to a number, as a batch norm's counter: no covered call
        tape = state.tape
        if tape is None:
            return self._call(op, func, args, kwargs)
        tape.begin(func, args, kwargs)
        result = self._call(op, func, args, kwargs)
        tape.end(result)
        return result

    def _call(self, op: str | None, func: Any, args: tuple, kwargs: dict) -> Any:
        state = self.state
        bound = bind(func, args, kwargs) if op is not None and self._is_open() else None
        if op is None or bound is None or not is_counted(bound):
            if state.deferred is not None:
                state.store_deferred()
            return self._uncovered(func, args, kwargs)
        index = next_call(state, op, bound)
        return run(state, state.program, index, op, bound, partial(self._uncovered, func, args, kwargs))

    def _is_open(self) -> bool:
        """Whether covered calls count: gradients are on and nobody else's saved-tensor hooks are on top."""
        if not torch.is_grad_enabled():
            return False
        top = top_hooks(False)
        if top is None:
            return True
        hook, state = top[0], self.state
        return state.hooked and type(hook) is partial and hook.func is pack and hook.args[0] is state

    def _uncovered(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in COMPOSED:
            with _Inside(self):
                return COMPOSED[func](*args, **kwargs)
        state = self.state
        state.unread = func in UNREAD
        try:
            if not catches(state) or state.hooked or not torch.is_grad_enabled() or top_hooks(False) is not None:
                return func(*args, **kwargs)
            with caught(state):
                return func(*args, **kwargs)
        finally:
            state.unread = False


class Counter(Interposer):
    """Counts the covered calls of a forward that PyTorch carries out itself, under a given plan of policy ``plain``."""

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        op = None if _is_compiling() else COVERED.get(func)
        if op is not None and torch.is_grad_enabled() and not hooks_are_active():
            bound = bind(func, args, kwargs)
            if bound is not None and is_counted(bound):
                next_call(self.state, op, bound)
        return func(*args, **(kwargs or {}))


class _Inside(TorchFunctionMode):
    """The calls that a function of :data:`COMPOSED` makes, none of which is covered."""

    def __init__(self, outer: Interposer) -> None:
        super().__init__()
        self._outer = outer

    def __torch_function__(self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self._outer._uncovered(func, args, kwargs or {})


@contextmanager
def interposed(state: ForwardState) -> Iterator[None]:
    """The forward's function mode around a block, and its hooks where custom Functions save what they are to catch."""
    state.hooked = state.program is None or state.program.catches_functions
    with caught(state) if state.hooked else nullcontext(), Interposer(state):
        yield
