"""The short way of a convolution: by PyTorch's own node, or by gistkit's where the input must go before its gradient
comes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from gistkit.capture import Conv2d
from gistkit.nn import conv
from gistkit.nn.standin import settings
from gistkit.runtime.calls import native
from gistkit.runtime.calls.fast import Kind, ParameterKind
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.program import Step


class FastConv2d:
    """A convolution over operands and under switches with which it ran before; ``prepared`` is how gistkit's own runs,
    None where PyTorch's does."""

    @staticmethod
    def takes(b: Conv2d) -> bool:
        """Whether the operands are of kinds that can be told again."""
        weight, bias = b.weight, b.bias
        return type(b.x) is torch.Tensor and type(weight) is Parameter and (bias is None or _alike(weight, bias))

    def __init__(self, step: Step, b: Conv2d, prepared: conv.Prepared | None) -> None:
        self._x, self._parameter, self._has_bias = Kind(b.x), ParameterKind(b.weight), b.bias is not None
        self._trains, self._geometry, self._options = b.weight.requires_grad, (b.weight.shape, b.weight.stride()), b[3:]
        self._decision, self._prepared = step.input, prepared
        self._lowered = _lowered(b.x)
        self._settings = settings()

    def __call__(
        self, region: Region, hooks: native.Hooks, x: Any, weight: Any, bias: Any, *options: Any
    ) -> torch.Tensor | None:
        if (bias is None) is self._has_bias or not self._x.fits(x) or options != self._options:
            return None
        if self._prepared is None:  # PyTorch's own takes what it gets; how it is kept depends on x alone
            if type(weight) is not Parameter or weight.requires_grad is not self._trains:
                return None
            return native.convolved(region, self._decision, hooks, x, weight, bias, *options)
        own = (weight, bias) if self._has_bias else (weight,)
        if not self._parameter.fits(*own) or (weight.shape, weight.stride()) != self._geometry:
            return None
        if settings() != self._settings or _lowered(x) != self._lowered:
            return None
        keep = partial(region.keep, decision=self._decision)
        return conv.carry_out(self._prepared, x, weight, bias, keep)


def _alike(weight: torch.Tensor, bias: torch.Tensor) -> bool:
    return ParameterKind(weight).fits(bias)


def _lowered(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast runs a convolution of x, None where there is none."""
    device_type = "cuda" if x.is_cuda else "cpu"
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


__all__ = ["FastConv2d"]
