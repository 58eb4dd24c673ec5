"""Drop-in classes: torch.nn's constructors, state-dict keys and results, with less kept for backward.

In ``eval()`` and under ``no_grad`` they run torch.nn's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.nn.conv import conv2d
from gistkit.nn.dropout import dropout
from gistkit.nn.keep import Keep, keep_coded, keep_dense
from gistkit.nn.linear import linear
from gistkit.nn.norm import keep_input
from gistkit.nn.pool import max_pool2d, relu_max_pool2d
from gistkit.nn.relu import relu


class _Training:
    """torch.nn's class, but where there is a backward to keep something for."""

    training: bool
    _kept: Callable[[torch.Tensor], Any]
    """The forward that keeps less."""

    def forward(self, input: torch.Tensor) -> Any:
        keeps = self.training and torch.is_grad_enabled()
        return self._kept(input) if keeps else super().forward(input)  # type: ignore[misc]


class _Coded(_Training):
    """Classes whose backward reads their input, which a codec of CODECS may hold; None holds the tensor itself."""

    codec: str | None
    _keep: Keep | None

    def extra_repr(self) -> str:
        shown = super().extra_repr()  # type: ignore[misc]
        return shown if self.codec is None else f"{shown}, codec={self.codec!r}"


def _constructor(of: type[torch.nn.Module]) -> Callable[..., None]:
    """``__init__`` with the arguments of a class of torch.nn, whichever its version has, and ``codec``."""

    def __init__(self: Any, *args: Any, codec: str | None = None, **kwargs: Any) -> None:
        of.__init__(self, *args, **kwargs)
        self._keep = None if codec is None else keep_coded(codec)
        self.codec = codec

    torchs = inspect.signature(of.__init__)
    own = inspect.Parameter("codec", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    __init__.__signature__ = torchs.replace(parameters=[*torchs.parameters.values(), own])  # type: ignore[attr-defined]
    return __init__


class ReLU(_Training, torch.nn.ReLU):
    """``torch.nn.ReLU`` that keeps a 1-bit mask; see :func:`gistkit.functional.relu`."""

    def _kept(self, input: torch.Tensor) -> torch.Tensor:
        return relu(input, self.inplace)


class MaxPool2d(_Training, torch.nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` that keeps 4 or 8 bits an output; see :func:`gistkit.functional.max_pool2d`.

    ``return_indices=True`` runs torch.nn's code.
    """

    def _kept(self, input: torch.Tensor) -> Any:
        windows = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
        return max_pool2d(input, *windows, self.return_indices)


class ReLUMaxPool2d(torch.nn.MaxPool2d):
    """A ReLU and a ``torch.nn.MaxPool2d`` (same constructor) in one pass; see
    :func:`gistkit.functional.relu_max_pool2d`."""

    def forward(self, input: torch.Tensor) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(torch.relu(input))
        windows = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
        return relu_max_pool2d(input, *windows, self.return_indices)


class Conv2d(_Coded, torch.nn.Conv2d):
    """``torch.nn.Conv2d`` that keeps its input under ``codec``; see :func:`gistkit.functional.conv2d`.

    Raises ValueError for a codec that CODECS does not have.
    """

    __init__ = _constructor(torch.nn.Conv2d)

    def _kept(self, input: torch.Tensor) -> torch.Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        where = (self.stride, padding, self.dilation, self.groups)
        return conv2d(input, self.weight, self.bias, *where, keep=self._keep)


class Linear(_Coded, torch.nn.Linear):
    """``torch.nn.Linear`` that keeps its input under ``codec``; see :func:`gistkit.functional.linear`.

    Raises ValueError for a codec that CODECS does not have.
    """

    __init__ = _constructor(torch.nn.Linear)

    def _kept(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias, keep=self._keep)


class BatchNorm2d(_Coded, torch.nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that keeps its input under ``codec``; see :func:`gistkit.functional.batch_norm`.

    Raises ValueError for a codec that CODECS does not have.
    """

    __init__ = _constructor(torch.nn.BatchNorm2d)

    def _kept(self, input: torch.Tensor) -> torch.Tensor:
        y = torch.nn.BatchNorm2d.forward(self, input)
        keep_input(y, self._keep or keep_dense, input, self.weight, self.bias)
        return y


class Dropout(_Training, torch.nn.Dropout):
    """``torch.nn.Dropout`` with the same random numbers that keeps a 1-bit mask; see
    :func:`gistkit.functional.dropout`."""

    def _kept(self, input: torch.Tensor) -> torch.Tensor:
        return dropout(input, self.p, True, self.inplace)
