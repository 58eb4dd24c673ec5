"""Which calls gistkit carries out itself, and which go to PyTorch unchanged.

PyTorch's own path is taken where nothing is recorded for backward, for dtypes and devices without kernels, for tensor
subclasses, and under function transforms and forward-mode differentiation, which need PyTorch's own formulas. An op
without a ``keep`` of its own is left to PyTorch under saved-tensor hooks too (checkpointing, ``save_on_cpu``), which
must see what it would keep whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from gistkit.kernels import is_channels_last

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
"""True of a tensor that belongs to a function transform, also after its end."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXACT_TYPES = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def recorded(*tensors: Any) -> bool:
    """Whether autograd records an op over these tensors (None and non-tensors are skipped)."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def transformed() -> bool:
    """Whether a function transform or forward-mode differentiation is in force here."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def covered(*tensors: Any) -> bool:
    """Whether gistkit has an implementation for these operands (None is skipped): exact tensor types, strided, fp32,
    bf16 or fp16, on a CPU or a CUDA device, no function transform, no forward-mode differentiation."""
    for x in tensors:
        if x is not None and (
            type(x) not in EXACT_TYPES
            or x.layout != torch.strided
            or x.dtype not in KERNEL_DTYPES
            or not (x.is_cpu or x.is_cuda)
            or x.is_neg()
            or x.is_nested
            or is_wrapped(x)
        ):
            return False
    return not transformed()


def overwritable(x: torch.Tensor) -> bool:
    """Whether an in-place Function may write to x: not a leaf (PyTorch raises its own error then, before anything is
    written) and not a view (PyTorch replays views in its own in-place ops only)."""
    return not (x.is_leaf and x.requires_grad) and not x._is_view()


def memory_format_of(x: torch.Tensor) -> torch.memory_format:
    """The memory format that PyTorch's 2-D ops give their results for the input x: ``suggest_memory_format`` of ATen.

    Where sizes of 1 make a tensor both contiguous and channels_last, the strides decide, as in ATen.
    """
    if is_channels_last(x):
        return torch.channels_last
    return suggest_memory_format(x) if x.dim() == 4 else torch.contiguous_format


def strides_of(shape: tuple[int, ...], layout: torch.memory_format) -> tuple[int, ...]:
    """Strides of a fresh tensor of that shape (4-D for channels_last) and memory format."""
    if layout == torch.channels_last:
        _, c, h, w = shape
        return (h * w * c, 1, w * c, c)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
