"""Fake tensors that are as large as real ones where PyTorch's own are not, and there where those are."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_BATCH_NORMS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default)
_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_NARROW = (torch.bfloat16, torch.float16)
_VECTORS = slice(1, 5)
"""Where a batch norm has weight, bias and running statistics among its arguments, as far as these are tensors."""


class Fakes(FakeTensorMode):
    """FakeTensorMode, but that the batch norm of narrow maps with fp32 weights or running statistics saves fp32
    statistics, as it does on a CPU: PyTorch's fake ones are of the maps' dtype. Where the CPU's operators will run
    (``on_cpu``) no gradient is made of a batch norm's input that needs none; cuDNN makes it all the same."""

    def __init__(self, on_cpu: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._on_cpu = on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is _BATCH_NORM_BACKWARD and self._on_cpu:
            return tuple(t if asked else None for t, asked in zip(out, args[-1], strict=True))
        if func not in _BATCH_NORMS or args[0].dtype not in _NARROW:
            return out
        given = (v.dtype for v in args[_VECTORS] if isinstance(v, torch.Tensor))
        if torch.float32 not in given:
            return out
        with self:
            return (out[0], *(torch.empty_like(v, dtype=torch.float32) for v in out[1:]))


__all__ = ["Fakes"]
