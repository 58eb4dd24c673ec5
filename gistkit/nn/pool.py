"""max_pool2d that keeps the positions of its maxima in their windows, 4 or 8 bits an output, and nothing else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gistkit import formats
from gistkit.errors import renamed
from gistkit.kernels import forward_geometry, is_channels_last, ops
from gistkit.nn.eligible import covered, memory_format_of, recorded, strides_of
from gistkit.nn.keep import once_differentiable, take

Pair = tuple[int, int]
_Windows = tuple[Pair, Pair, Pair]
Size = int | tuple[int, ...] | list[int]


class _Map(NamedTuple):
    codes: torch.Tensor
    shape: torch.Size
    layout: torch.memory_format
    nhwc: bool
    windows: _Windows
    zero_code: bool
    bits: int


def _restrided(x: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
    """x (4-D) with exactly the strides of a fresh tensor of that memory format."""
    x = x.contiguous(memory_format=layout)
    strides = strides_of(x.shape, layout)
    return x if x.stride() == strides else x.as_strided(x.shape, strides).detach()


class _MaxPool2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, windows: tuple, ceil_mode: bool, relu: bool, zero_code: bool, bits: int
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        layout = memory_format_of(x)
        batch = x if x.dim() == 4 else x.unsqueeze(0)
        source = batch.contiguous(memory_format=layout)
        y, codes = ops.maxpool_forward(source, *windows, ceil_mode, relu, zero_code, bits)
        ctx.kept = _Map(codes, x.shape, layout, is_channels_last(source), windows, zero_code, bits)
        y = _restrided(y, layout)
        return y if x.dim() == 4 else y.view(y.shape[1:]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        kept: _Map = take(ctx)
        height, width = kept.shape[-2:]
        batch = grad if grad.dim() == 4 else grad.unsqueeze(0)
        grad_x = ops.maxpool_backward(
            batch, kept.codes, height, width, *kept.windows, kept.nhwc, kept.zero_code, kept.bits
        )
        grad_x = _restrided(grad_x, kept.layout)
        return grad_x if len(kept.shape) == 4 else grad_x.squeeze(0), None, None, None, None, None


def pair(value: Any) -> Pair | None:
    """An int or a sequence of one or two as a pair (vertical, horizontal); None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, (tuple, list)) and len(value) in (1, 2) and all(type(v) is int for v in value):
        return (value[0], value[-1])
    return None


def _windows(kernel_size: Any, stride: Any, padding: Any, dilation: Any) -> _Windows | None:
    """Kernel, stride and padding as pairs; None where PyTorch's own pool runs, or shall raise."""
    step = kernel_size if stride is None or stride in ((), []) else stride
    kernel, step, around = (pair(v) for v in (kernel_size, step, padding))
    if kernel is None or step is None or around is None or pair(dilation) != (1, 1):
        return None
    return None if min(kernel) < 1 or min(step) < 1 or min(around) < 0 else (kernel, step, around)


def _code_bits(kernel: Pair, zero_code: bool) -> int | None:
    """Bits of one code; None where the window has more positions than a byte can tell apart."""
    symbols = kernel[0] * kernel[1] + zero_code
    if symbols <= formats.ARGMAX4_POSITIONS:
        return 4
    return 8 if symbols <= formats.ARGMAX8_POSITIONS else None


def _applicable(x: torch.Tensor, windows: _Windows, ceil_mode: bool) -> bool:
    """Whether the operator takes this pool; else PyTorch runs or raises its own error."""
    kernel, _, padding = windows
    if x.dim() not in (3, 4) or x.numel() == 0 or any(p > k // 2 for p, k in zip(padding, kernel, strict=True)):
        return False
    g = forward_geometry(x if x.dim() == 4 else x.unsqueeze(0), *windows, ceil_mode)
    return g.images > 0 and min(g.out_height, g.out_width) > 0


def _pool(x: Any, where: tuple, ceil_mode: bool, return_indices: bool, relu: bool, zero: bool) -> Any:
    if not return_indices and recorded(x) and covered(x):
        windows = _windows(*where)
        bits = None if windows is None else _code_bits(windows[0], zero)
        if windows is not None and bits is not None and _applicable(x, windows, ceil_mode):
            return _MaxPool2d.apply(x, windows, bool(ceil_mode), relu, zero, bits)
    # a second ReLU changes no value of a ReLU's output, and zeroes the gradient as the codes would have
    x = torch.relu(x) if zero else x
    return F.max_pool2d(x, *where, ceil_mode, return_indices)  # type: ignore


@renamed(zero_code="mask_in_pool=")
def max_pool2d(
    input: torch.Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    mask_in_pool: bool = False,
) -> Any:
    """``torch.nn.functional.max_pool2d``, bit for bit, that keeps neither its input nor int64 indices.

    input: [N, C, H, W] or [C, H, W], fp32, bf16 or fp16, any strides. Keeps 4 bits an output for windows of up to 16
    positions, 8 bits up to 256; larger windows, dilated ones, other dtypes, ``return_indices=True`` (output and
    indices), and arguments that PyTorch rejects, go to PyTorch. ``mask_in_pool=True`` (15 and 255 positions), for a
    ReLU's output: no gradient flows from an output that is not positive, so that the ReLU needs no mask. Does not
    synchronise. Gist (ISCA 2018) section III-A.
    """
    return _pool(input, (kernel_size, stride, padding, dilation), ceil_mode, return_indices, False, mask_in_pool)


def relu_max_pool2d(
    input: torch.Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """``max_pool2d(relu(input), ...)``, bit for bit, in one pass: the ReLU's output never exists and only the pool's
    codes are kept.

    Arguments, limits and errors as :func:`max_pool2d`'s with ``mask_in_pool=True``.
    """
    return _pool(input, (kernel_size, stride, padding, dilation), ceil_mode, return_indices, True, True)
