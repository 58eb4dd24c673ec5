"""batch_norm that keeps its input in another form, and the rebuild of its output from that input.

The rebuild repeats the forward's elementwise half from the saved statistics. What that arithmetic is depends on
device, dtype and layout, so :func:`rebuild_candidates` lists what is known and the caller takes the first that
reproduces a real forward bit for bit on the device in use. With alpha = weight * invstd, on torch 2.13:

| where | output |
|---|---|
| CPU, contiguous or channels_last | fma(x, alpha, beta) in fp32, rounded once to x's dtype |
| CPU, other strides | ((x - mean) * invstd) * weight + bias, each rounded to the statistics' dtype, contiguous |
| CUDA, PyTorch's kernel | weight * (x - mean) * invstd + bias: ``aten::batch_norm_elemt`` |
| CUDA, cuDNN | not documented; gistkit's kernel: fma(x - mean, alpha, bias), fma((x - mean) * invstd, weight, bias) |

On CUDA gistkit's own kernel does all of them in one pass (:func:`by_kernel`,
:mod:`gistkit.kernels.rebuild.rebuild`); it is asked first, and PyTorch's operators where it does not match.

There beta = fma(-mean, alpha, bias) where the statistics are fp32 (that is, unless the parameters are bf16 or fp16),
else bias - mean * alpha with both rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.capture import hooks_are_active
from gistkit.kernels import FORMS, is_channels_last, is_dense
from gistkit.kernels.launch import direct
from gistkit.nn.eligible import covered
from gistkit.nn.keep import Keep, keep_dense, replace_saved

Vector = torch.Tensor | None
Rebuild = Callable[..., torch.Tensor]
"""(x, mean, 1/std, weight, bias) -> the batch norm's output."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""


def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    keep: Keep | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.batch_norm``, bit for bit, that in training keeps its input as ``keep`` makes it.

    input: [N, C, ...] fp32, bf16 or fp16; the others [C] or None, of its dtype or fp32. Running statistics are updated
    as PyTorch updates them. ``keep``: a callable tensor -> Kept (default: the tensor). Inference, empty batches, other
    dtypes, tensors with gaps and calls under saved-tensor hooks are PyTorch's own. Raises what PyTorch raises. Does not
    synchronise.
    """
    y = F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        keep_input(y, keep or keep_dense, input, running_mean, running_var, weight, bias)
    return y


def keep_input(y: torch.Tensor, keep: Keep, x: torch.Tensor, *others: Vector) -> None:
    """Have the node of y, the batch norm of x in training, keep what ``keep`` makes of x, where that can be."""
    if keeps_its_input(y) and covered(x, *others) and not hooks_are_active() and is_dense(x) and x.numel() > 0:
        replace_saved(y.grad_fn, "input", keep(x))


def keeps_its_input(y: torch.Tensor) -> bool:
    """Whether y's node is a batch norm's that saves its input where one can get at it."""
    return y.grad_fn is not None and hasattr(y.grad_fn, "_raw_saved_input")


def _over_channels(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.detach().view((1, -1) + (1,) * (x.dim() - 2))


def _fused(x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    """PyTorch's addcmul fuses on the CPU, as its batch norm's loops do."""
    alpha = invstd.float() if weight is None else weight.float() * invstd.float()
    constant = torch.zeros_like(alpha) if bias is None else bias.float()
    if mean.dtype == torch.float32:
        beta = torch.addcmul(constant, mean, alpha, value=-1)
    else:
        beta = constant - mean.float() * alpha
    alpha, beta = _over_channels(alpha, x), _over_channels(beta, x)
    if x.dtype == torch.float32:
        return torch.addcmul(beta, x, alpha)
    wide = x.float()
    return torch.addcmul(beta, wide, alpha, out=wide).to(x.dtype)


def _stepwise(x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    y = x.to(mean.dtype).contiguous().sub(_over_channels(mean, x)).mul_(_over_channels(invstd, x))
    if weight is not None:
        y = y.mul_(_over_channels(weight, x))
    if bias is not None:
        y = y.add_(_over_channels(bias, x))
    return y.to(x.dtype)


def _elementwise_kernel(
    x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector
) -> torch.Tensor:
    return torch.ops.aten.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)


@lru_cache(maxsize=1024)
def plane_of(shape: torch.Size, stride: tuple[int, ...]) -> int:
    """Elements of one channel that lie together in a dense tensor of that geometry, contiguous or channels_last."""
    return 1 if is_channels_last(torch.empty_strided(shape, stride, device="meta")) else prod(shape[2:])


def kernel_factors(mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> list[torch.Tensor]:
    """Mean, 1/std, weight and bias, [C] each, as gistkit's own kernel takes them."""
    mean, invstd = mean.float(), invstd.float()
    weight = torch.ones_like(mean) if weight is None else weight.detach()
    bias = torch.zeros_like(mean) if bias is None else bias.detach()
    return [mean, invstd, weight, bias]


def by_kernel(form: str, x: torch.Tensor, *vectors: Any) -> torch.Tensor:
    """A batch norm's output from its input by gistkit's own kernel; ``form``: the arithmetic, one of
    :data:`gistkit.kernels.FORMS`; ``vectors``: mean, 1/std, weight and bias."""
    y = torch.empty_like(x)
    direct.bn_rebuild(x, kernel_factors(*vectors), form, plane_of(x.shape, x.stride()), None, [], "", False, y)
    return y


KERNEL_CANDIDATES: tuple[Rebuild, ...] = tuple(partial(by_kernel, form) for form in FORMS)


def rebuild_candidates(x: torch.Tensor) -> list[Rebuild]:
    """Functions (x, mean, invstd, weight, bias) -> batch norm's output, the likeliest for x's device and layout first.

    None of them is to be relied on before it has reproduced a real forward bit for bit.
    """
    if x.device.type == "cuda":
        own = KERNEL_CANDIDATES if x.is_contiguous() or is_channels_last(x) else ()
        return [*own, _elementwise_kernel, _fused, _stepwise]
    if x.is_contiguous():
        return [_fused, _stepwise]
    last = x.dim() in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
    # one alone: the other would take a second copy of x, which a budget has no room for
    return [_fused if last else _stepwise]


def widens(arithmetic: Rebuild, x: torch.Tensor) -> bool:
    """Whether an arithmetic makes more tensors of x's size than its result (at most four times x's bytes)."""
    if arithmetic is _elementwise_kernel or arithmetic in KERNEL_CANDIDATES:
        return False
    return x.dtype != torch.float32 or (arithmetic is _stepwise and not x.is_contiguous())


def result_like(arithmetic: Rebuild, x: torch.Tensor) -> torch.Tensor:
    """Memory for an arithmetic's result."""
    layout = torch.contiguous_format if arithmetic is _stepwise else torch.preserve_format
    return torch.empty_like(x, memory_format=layout)
