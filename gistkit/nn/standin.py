"""A tensor that stands in for a convolution's input while its input gradient is taken, and occupies no memory.

The input gradient of a convolution depends on its input's shape and memory format only. ``aten.convolution_backward``
still wants a tensor there, and some backends bring it into another layout first, which would read it. What is safe:

| backend | stand-in |
|---|---|
| oneDNN, cuDNN | strides of the backend's own memory format, storage emptied: never copied, so never read |
| ATen's matrix product on the CPU, one group | the same; several groups are copied out of the input one by one |
| others, contiguous input | one element of the weight, expanded to the shape: copying it is harmless |
| ATen's on the CPU, weight in the input's memory format | the same |
| others | none: the input itself must be there (:func:`gistkit.capture.step.conv_backward.needs_input`) |

Bits and strides of the gradients are those of one joint call (tests/nn/test_functional.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gistkit.capture import needs_input, takes_its_own
from gistkit.nn.eligible import strides_of

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """Where a convolution's windows lie."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: tuple[bool, bool, bool]) -> Any:
        """(input gradient, weight gradient, bias gradient), those of the mask, else None: a weight gradient that oneDNN
        makes with the bias's although nobody asked for it is let go of."""
        bias_sizes = [weight.shape[0]] if mask[2] else None
        where = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        found = torch.ops.aten.convolution_backward.default(grad, x, weight, bias_sizes, *where, mask)
        return [g if asked else None for g, asked in zip(found, mask, strict=True)]

    def memory_format(self, x: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
        """That of the result, and of what the backend reads."""
        return torch._C._conv_determine_backend_memory_format(x, weight, self.backend(x, weight))

    def backend(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        """The implementation that PyTorch picks for these operands; looks at shapes, strides, dtypes and settings."""
        where = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        return torch._C._select_conv_backend(x, weight, None, *where)


def settings() -> tuple:
    """PyTorch's switches that :meth:`Geometry.backend` and the memory format of a convolution depend on."""
    return (
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_nnpack_enabled(),  # type: ignore[attr-defined]
        torch.get_num_threads(),
    )


@dataclass
class StandIn:
    """A recipe, made while the input is at hand; holds no memory. ``needs_input``: there is no stand-in.

    It serves every call of the same geometry, and remembers the tensor that it made last, with settings and weight.
    """

    needs_input: bool
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...] | None = None
    _made: tuple[tuple, torch.Tensor] | None = None

    @staticmethod
    def unread(x: torch.Tensor) -> StandIn:
        """For an input gradient that asks for the input's shape alone."""
        return StandIn(False, x.shape, x.dtype, x.device)

    @staticmethod
    def of(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> StandIn:
        if isinstance(x, FakeTensor):
            return StandIn(True, x.shape, x.dtype, x.device)
        strides = _unread_strides(x, weight, geometry)
        needs = strides is None and needs_input(x, weight, geometry)
        return StandIn(needs, x.shape, x.dtype, x.device, strides)

    def tensor(self, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The stand-in; takes its memory for a moment only, once the input has gone, and the first time only."""
        asked = (settings(), weight.stride(), weight.dtype)
        if self._made is not None and self._made[0] == asked:
            return self._made[1]
        made = self._make(weight, geometry)
        if made.untyped_storage().nbytes() == 0:  # what holds memory, be it one element, is not kept beyond the call
            self._made = (asked, made)
        return made

    def _make(self, weight: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        if self.strides is not None:
            empty = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            empty.untyped_storage().resize_(0)
            if self.strides == _unread_strides(empty, weight, geometry):
                return empty
        if weight.dtype == self.dtype and weight.device == self.device:  # one of its elements: no memory of its own
            return weight.detach().as_strided(self.shape, (0,) * len(self.shape))
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


def _unread_strides(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> tuple[int, ...] | None:
    """The strides in which the backend takes an input like x as it is, without a copy, which would read memory that is
    not there; None where there are none."""
    backend = geometry.backend(x, weight)
    if not takes_its_own(backend, x, geometry.groups):
        return None
    return strides_of(x.shape, torch._C._conv_determine_backend_memory_format(x, weight, backend))
