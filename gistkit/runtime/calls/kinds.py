"""What a specialised call depends on of its operands, so that it can tell whether it may run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from gistkit.nn.eligible import covered, is_wrapped
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step

_NUMBERS = frozenset((int, float, bool, tuple, str, type(None)))


class SpecialisedCall:
    """One covered call, ready to run: ``call(state, *operands)``, for operands of the kind that it was made for."""

    fits: Callable[..., bool] = lambda *_: True
    """Whether the operands, in the order of the call's form in :mod:`gistkit.capture.calls`, are of that kind."""

    def __init__(self, state: ForwardState, step: Step, b: Any) -> None:
        self.step = step

    def __call__(self, state: ForwardState, *operands: Any) -> Any:
        raise NotImplementedError

    def at(self, state: ForwardState, module: Any, x: Any) -> torch.Tensor | None:
        """The call as such a leaf's whole forward of x, where it fits and :func:`gistkit.runtime.calls.run.run` would
        do no more; else None."""
        return None


class TensorKind:
    """Dtype, device, geometry and need of a gradient of a plain strided tensor; whether its call overwrites it."""

    __slots__ = ("_device", "_dtype", "_inplace", "_needs_gradient", "_shape", "_stride")

    def __init__(self, x: torch.Tensor, inplace: bool = False) -> None:
        self._dtype, self._device, self._needs_gradient = x.dtype, x.device, x.requires_grad
        self._shape, self._stride, self._inplace = x.shape, x.stride(), inplace

    def fits(self, x: Any, inplace: Any = False) -> bool:
        return (
            type(x) is torch.Tensor
            and inplace is self._inplace
            and x.dtype is self._dtype
            and x.shape == self._shape
            and x.layout is torch.strided
            and x.stride() == self._stride
            and x.requires_grad is self._needs_gradient
            and x.device == self._device
            and not x.is_neg()
            and not is_wrapped(x)
            and not (inplace and ((self._needs_gradient and x.is_leaf) or x._is_view()))  # as overwritable() has it
        )


def weight_kind(weight: Any) -> tuple | None:
    """What an operator depends on of a weight."""
    if weight is None:
        return None
    return type(weight) is Parameter, weight.dtype, weight.requires_grad, weight.shape, weight.stride()


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast runs x's convolutions and products, None where it is off."""
    device_type = "cuda" if x.is_cuda else "cpu"
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def runs(values: tuple) -> bool:
    """Whether gistkit's operators take these operands, of which those that are no tensors do not matter. For others
    PyTorch's own runs."""
    if FakeTensor in map(type, values):
        return False
    return covered(*[v for v in values if type(v) not in _NUMBERS and isinstance(v, torch.Tensor)])
