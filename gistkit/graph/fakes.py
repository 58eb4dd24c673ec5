"""Fake tensors that are as large as real ones where PyTorch's own are not."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_BATCH_NORMS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default)
_NARROW = (torch.bfloat16, torch.float16)
_VECTORS = slice(1, 5)
"""Where a batch norm has weight, bias and running statistics among its arguments, as far as these are tensors."""


class Fakes(FakeTensorMode):
    """FakeTensorMode, but that the batch norm of narrow maps with fp32 weights or running statistics saves fp32
    statistics, as it does on a CPU: PyTorch's fake ones are of the maps' dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func not in _BATCH_NORMS or args[0].dtype not in _NARROW:
            return out
        given = (v.dtype for v in args[_VECTORS] if isinstance(v, torch.Tensor))
        if torch.float32 not in given:
            return out
        with self:
            return (out[0], *(torch.empty_like(v, dtype=torch.float32) for v in out[1:]))


__all__ = ["Fakes"]
