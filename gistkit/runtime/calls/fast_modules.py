"""The short way of a ReLU, a convolution and a batch norm that are modules, past PyTorch's function modes.

A call reaches a function mode through two to five frames of Python's and C's, a batch norm's module three of them (its
input's dimensions, its counter, itself): 10 to 30 us a layer, as much as the layer's own launch. So while a compressed
forward runs, its modules of exactly these classes are of a subclass that offers a call to the region's fast calls
first, and goes PyTorch's way where there is none. Only ``__class__`` differs, and only meanwhile: hooks, parameters,
attributes and names are the module's own, copies and pickles made within a forward are of the plain class, and a
replica or another thread that meets the subclass has PyTorch's forward.
"""

from __future__ import annotations

import copyreg
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gistkit.runtime.calls.fast import run_module
from gistkit.runtime.calls.interpose import Interposer
from gistkit.runtime.program.program import Program

_modes = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_enabled = torch._C._is_torch_function_mode_enabled
_pop = torch._C._pop_torch_function_stack  # type: ignore[attr-defined]
_push = torch._C._push_on_torch_function_stack
_is_traced = torch.compiler.is_dynamo_compiling


class _Short(nn.Module):
    """What the subclasses share: they show themselves as what they are otherwise."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return copyreg._reconstructor, (PLAIN[type(self)], object, None), *state  # type: ignore[attr-defined]

    def _get_name(self) -> str:
        return PLAIN[type(self)].__name__


class _ReLU(_Short, nn.ReLU):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs and len(args) == 1 and not _is_traced() and _modes() == 1 and _enabled():
            mode = _pop()
            try:
                y = None
                if type(mode) is Interposer:
                    y = run_module(mode.region, mode.pack, F.relu, 0, args[0], self.inplace)
            finally:
                _push(mode)
            if y is not None:
                return y
        return nn.ReLU.forward(self, *args, **kwargs)


class _Conv2d(_Short, nn.Conv2d):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs and len(args) == 1 and not _is_traced() and _modes() == 1 and _enabled():
            own, y = self._parameters, None
            mode = _pop()
            try:
                if type(mode) is Interposer and self.padding_mode == "zeros" and "weight" in own and "bias" in own:
                    y = run_module(
                        mode.region, mode.pack, F.conv2d, 0, args[0], own["weight"], own["bias"],
                        self.stride, self.padding, self.dilation, self.groups,
                    )  # fmt: skip
            finally:
                _push(mode)
            if y is not None:
                return y
        return nn.Conv2d.forward(self, *args, **kwargs)


class _BatchNorm2d(_Short, nn.BatchNorm2d):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs and len(args) == 1 and not _is_traced() and _modes() == 1 and _enabled():
            mode, y = _pop(), None
            try:
                if type(mode) is Interposer and self.training and self.track_running_stats:
                    y = self._trained(mode, args[0])
            finally:
                _push(mode)
            if y is not None:
                return y
        return nn.BatchNorm2d.forward(self, *args, **kwargs)

    def _trained(self, mode: Interposer, x: torch.Tensor) -> torch.Tensor | None:
        own, buffers, momentum = self._parameters, self._buffers, self.momentum
        try:
            counter: Any = buffers["num_batches_tracked"]
            running, vectors = (buffers["running_mean"], buffers["running_var"]), (own["weight"], own["bias"])
        except KeyError:
            return None
        if type(momentum) is not float or type(counter) is not torch.Tensor:
            return None
        # the counter's addition comes first where PyTorch makes it, and is a call
        y = run_module(mode.region, mode.pack, F.batch_norm, 1, x, *running, *vectors, True, momentum, self.eps)
        if y is not None:
            counter.add_(1)
        return y


SHORT: dict[type, type] = {nn.ReLU: _ReLU, nn.Conv2d: _Conv2d, nn.BatchNorm2d: _BatchNorm2d}
PLAIN: dict[type, type] = {short: plain for plain, short in SHORT.items()}
"""By subclass the class that the module is of otherwise."""
OVERRIDING = frozenset(
    "forward _conv_forward _check_input_dim weight bias running_mean running_var num_batches_tracked".split()
)
"""Attributes of a module that stand before its class's."""
_METHODS = tuple((plain, plain.forward) for plain in SHORT)
_FUNCTIONS = F.relu, F.conv2d, F.batch_norm, nn.Conv2d._conv_forward, nn.BatchNorm2d._check_input_dim
_set_class = object.__setattr__


def _as_known() -> bool:
    """Whether the classes do what is written here, and nobody has put another forward or function in."""
    now = F.relu, F.conv2d, F.batch_norm, nn.Conv2d._conv_forward, nn.BatchNorm2d._check_input_dim
    return now == _FUNCTIONS and all(plain.forward is forward for plain, forward in _METHODS)


def _candidates(model: nn.Module) -> tuple[weakref.ref[nn.Module], ...]:
    """The modules that may have a short way; none of a model of which a compiler has a part."""
    found = []
    for module in model.modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return ()
        if type(module) in SHORT:
            found.append(weakref.ref(module))
    return tuple(found)


class ShortModules:
    """The modules of one model while its forwards run."""

    def __init__(self) -> None:
        self._found: tuple[Program | None, tuple[weakref.ref[nn.Module], ...]] = (None, ())

    def open(self, model: nn.Module, program: Program) -> list[nn.Module]:
        """Give the model's modules their short way; which ones, for :meth:`close`. A new plan looks for them anew."""
        known, candidates = self._found
        if known is not program:
            candidates = _candidates(model)
            self._found = program, candidates
        opened: list[nn.Module] = []
        if not _as_known():
            return opened
        for reference in candidates:
            module = reference()
            short = SHORT.get(type(module))
            if short is not None and OVERRIDING.isdisjoint(module.__dict__):
                _set_class(module, "__class__", short)
                opened.append(module)  # type: ignore[arg-type]
        return opened

    @staticmethod
    def close(opened: list[nn.Module]) -> None:
        """Take it from them again."""
        for module in opened:
            plain = PLAIN.get(type(module))
            if plain is not None:
                _set_class(module, "__class__", plain)


__all__ = ["PLAIN", "ShortModules"]
