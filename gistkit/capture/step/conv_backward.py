"""The dataflow inside ``aten::convolution_backward``: which gradients read the input. Neither a real nor a fake call
shows that, as one operator makes all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CONV_BACKWARD = torch.ops.aten.convolution_backward.default
_Backend = torch._C._ConvBackend  # type: ignore[attr-defined]
_NEVER_COPIED = (_Backend.Mkldnn, _Backend.Cudnn)
_COPIED_INTO_ONE_FORMAT = (_Backend.Slow2d, _Backend.SlowDilated2d)
_MASK = 10


def unasked_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes of the weight gradient that oneDNN also makes when only the bias's is asked for; 0 for other operators."""
    if func is not CONV_BACKWARD or args[_MASK][1] or not args[_MASK][2]:
        return 0
    _, x, weight, bias_sizes, *where = args[:_MASK]
    if torch._C._select_conv_backend(x, weight, None, *where, bias_sizes) != _Backend.Mkldnn:
        return 0
    return weight.numel() * weight.element_size()


def reads_input(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is a two-dimensional convolution's backward whose input must be there for the input gradient
    too, where that is taken by itself (:func:`needs_input`)."""
    if func is not CONV_BACKWARD:
        return False
    _, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = args
    return mask[0] and not transposed and x.dim() == 4 and needs_input(x, weight, (stride, padding, dilation, groups))


def needs_input(x: torch.Tensor, weight: torch.Tensor, geometry: Sequence[Any]) -> bool:
    """Whether a convolution of that geometry (stride, padding, dilation, groups) reads its input for its input's
    gradient, and neither an empty tensor nor one element of the weight, expanded to its shape, can stand in for it: the
    backend brings it into a memory format first, which depends on its own and is that of the gradient."""
    if x.is_contiguous():
        return False
    stride, padding, dilation, groups = geometry
    backend = torch._C._select_conv_backend(x, weight, None, stride, padding, dilation, False, (0, 0), groups)
    if takes_its_own(backend, x, groups):
        return False
    if not x.is_cpu or backend not in _COPIED_INTO_ONE_FORMAT:
        return True
    expanded = x.detach().as_strided(x.shape, (0,) * x.dim())
    formats = {torch._C._conv_determine_backend_memory_format(t, weight, backend) for t in (x, expanded)}
    return len(formats) > 1


def takes_its_own(backend: Any, x: torch.Tensor, groups: int) -> bool:
    """Whether the backend never copies an input of its own memory format: ATen's matrix product on the CPU copies it
    group by group where there are several."""
    return backend in _NEVER_COPIED or (backend == _Backend.Slow2d and x.is_cpu and groups == 1)
