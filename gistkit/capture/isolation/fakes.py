"""A FakeTensorMode whose tensors have the dtypes of real ones and exist only where real ones do."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_NORMS = {
    _aten.native_batch_norm.default: slice(1, 5),
    _aten._native_batch_norm_legit.default: slice(1, 5),
    _aten.native_layer_norm.default: slice(2, 4),
    _aten.native_group_norm.default: slice(1, 3),
}
"""Norms with where they have weight, bias and running statistics among their arguments, as far as these are tensors."""
_BATCH_NORM_BACKWARD = _aten.native_batch_norm_backward.default
_GROUP_NORM_BACKWARD = _aten.native_group_norm_backward.default
_NARROW = (torch.bfloat16, torch.float16)


class Fakes(FakeTensorMode):
    """FakeTensorMode, but that a norm of narrow maps with fp32 weights or running statistics saves fp32 statistics, as
    it does on a CPU, where PyTorch's fake ones are of the maps' dtype, and a group norm's gradient is as narrow as its
    input. Where the CPU's operators will run (``on_cpu``) no gradient is made of a batch norm's input that needs none;
    cuDNN makes it all the same."""

    def __init__(self, on_cpu: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self._on_cpu = on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # TorchScript's calls leave function modes on: they would see this
            out: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is _BATCH_NORM_BACKWARD and self._on_cpu:
            return tuple(t if asked else None for t, asked in zip(out, args[-1], strict=True))
        if func is _GROUP_NORM_BACKWARD and out[0] is not None and out[0].dtype != args[1].dtype:
            return self._as(args[1].dtype, out[0]), *out[1:]
        if func not in _NORMS or args[0].dtype not in _NARROW:
            return out
        given = (v.dtype for v in args[_NORMS[func]] if isinstance(v, torch.Tensor))
        return (out[0], *(self._as(torch.float32, v) for v in out[1:])) if torch.float32 in given else out

    def _as(self, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty_like(like, dtype=dtype)
