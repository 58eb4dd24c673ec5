"""Convolution: PyTorch's own node with its saved input replaced, or gistkit's, which takes the weight gradient first.

PyTorch's node takes both gradients in one call and holds the decoded input meanwhile. Gistkit's lets go of the decoded
input before the input gradient is taken, which is less memory and two calls of the library.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from gistkit.capture import Conv2d
from gistkit.ir import Decision
from gistkit.nn import conv
from gistkit.nn.eligible import recorded
from gistkit.nn.standin import settings
from gistkit.runtime.calls.kinds import SpecialisedCall, TensorKind, autocast_dtype, weight_kind
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step
from gistkit.runtime.stash.stash import DENSE_VALUES


def specialise(state: ForwardState, step: Step, b: Conv2d) -> SpecialisedCall | None:
    """How a convolution over such operands runs as planned."""
    x, weight = b.x, b.weight
    if not conv.takes(x, weight):
        return None
    native = type(weight) is Parameter and weight.requires_grad and type(b.padding) is tuple and x.dim() == 4
    if native and not state.strict:
        if not x.requires_grad or state.has_room(step.index, x):
            return NativeConv2d(step, b)
    return SplitConv2d(state, step, b)


class NativeConv2d(SpecialisedCall):
    """PyTorch's convolution; how its input is kept depends on the input alone."""

    def __init__(self, step: Step, b: Conv2d) -> None:
        self._decision, self._options, self._trains = step.input, b[3:], b.weight.requires_grad

    def fits(self, x: Any, weight: Any, bias: Any, *options: Any) -> bool:
        return type(weight) is Parameter and weight.requires_grad is self._trains and options == self._options

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any, *options: Any) -> torch.Tensor:
        y: Any = torch.conv2d(x, weight, bias, *options)
        # autocast's copy of x, which is saved then, is another tensor
        stash = state.table.find(x) if y.dtype is x.dtype else None
        if stash is None:
            replace_input(state, y, self._decision)
            return y
        y.grad_fn._raw_saved_input.register_hooks(stash.hold(x), DENSE_VALUES)
        return y


def replace_input(state: ForwardState, y: Any, decision: Decision | None) -> None:
    """Have y's node keep what it saved as its input as decided."""
    if decision is None or not decision.stays:
        y.grad_fn._raw_saved_input.register_hooks(partial(state.keep, decision=decision), DENSE_VALUES)


class SplitConv2d(SpecialisedCall):
    """Gistkit's convolution: prepared for operands of one kind and one setting of autocast and the libraries."""

    direct = False

    def __init__(self, state: ForwardState, step: Step, b: Conv2d) -> None:
        self._step, self._slices = step, state.weight_grad_slices(step)
        self._x, self._weight, self._bias = TensorKind(b.x), weight_kind(b.weight), weight_kind(b.bias)
        self._options, self._lowered, self._settings = b[3:], autocast_dtype(b.x), settings()
        trained = recorded(b.x, b.weight, b.bias)
        self._call = conv.prepare(b.x, b.weight, self._options) if trained else None

    def fits(self, x: Any, weight: Any, bias: Any, *options: Any) -> bool:
        return (
            self._x.fits(x)
            and weight_kind(weight) == self._weight
            and weight_kind(bias) == self._bias
            and options == self._options
            and autocast_dtype(x) is self._lowered
            and settings() == self._settings
        )

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any, *options: Any) -> torch.Tensor:
        if self._call is None:
            return torch.conv2d(x, weight, bias, *options)
        keep = partial(state.keep, decision=self._step.input)
        return conv.carry_out(self._call, x, weight, bias, keep, self._slices)
