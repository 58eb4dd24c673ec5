"""What ``aten::convolution_backward`` makes of what, which its one call and a fake one of it do not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

_BACKWARD = torch.ops.aten.convolution_backward.default
_MKLDNN = torch._C._ConvBackend.Mkldnn  # type: ignore[attr-defined]
_MASK = 10


def made_of(args: Sequence[Any], out: Sequence[Any]) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """The gradients that there are, each with what it depends on: the input's on the output's and the weight, those of
    weight and bias on the output's and the input."""
    grad, x, weight = args[:3]
    pairs = zip(out, ((grad, weight), (grad, x), (grad, x)), strict=True)
    yield from ((t, of) for t, of in pairs if t is not None)


def unasked_bytes(func: Any, args: Sequence[Any]) -> int:
    """Bytes of the weight gradient that oneDNN makes with a bias's where the bias's alone is asked for; 0 for any other
    operator."""
    if func is not _BACKWARD or args[_MASK][1] or not args[_MASK][2]:
        return 0
    _, x, weight, bias_sizes, *where = args[:_MASK]
    if torch._C._select_conv_backend(x, weight, None, *where, bias_sizes) != _MKLDNN:
        return 0
    return weight.numel() * weight.element_size()


__all__ = ["made_of", "unasked_bytes"]
