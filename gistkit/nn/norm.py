"""batch_norm that keeps its input as it is told, and the rebuild of its output from that input.

The rebuild repeats the forward's elementwise half from the saved statistics. What that arithmetic is depends on
device, dtype and layout, so :func:`rebuild_candidates` lists what is known and the caller takes the first that
reproduces a real forward bit for bit on the device in use. With alpha = weight * invstd, on torch 2.13:

| where | output |
|---|---|
| CPU, contiguous or channels_last | fma(x, alpha, beta) in fp32, rounded once to x's dtype |
| CPU, other strides | ((x - mean) * invstd) * weight + bias, each rounded to the statistics' dtype, contiguous |
| CUDA, PyTorch's kernel | weight * (x - mean) * invstd + bias: ``aten::batch_norm_elemt`` |
| CUDA, cuDNN | not documented; also tried: fma(x - mean, alpha, bias), fma((x - mean) * invstd, weight, bias) |

On CUDA gistkit's own kernel does all but the last of them in one pass (:class:`Factors`,
:mod:`gistkit.kernels.rebuild.rebuild`); it is asked first, and PyTorch's operators where it does not match.

There beta = fma(-mean, alpha, bias) where the statistics are fp32 (that is, unless the parameters are bf16 or fp16),
else bias - mean * alpha with both rounded to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.kernels import FORMS, is_channels_last, is_dense
from gistkit.nn.eligible import covered, hooked, recorded
from gistkit.nn.factors import Factors, Vector
from gistkit.nn.keep import Keep, hold, hold_weight, keep_dense, take, weight_of
from gistkit.nn.once import apply, once_differentiable

Statistics = Callable[[torch.Tensor, torch.Tensor], None]
Rebuild = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Vector, Vector], torch.Tensor]


STATISTICS = slice(1, 4)
"""Where a node's hold has what it keeps for itself: mean, 1/std, the library's reserve."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, options: Any, keep: Keep, on_stats: Any):
        ctx.set_materialize_grads(False)
        running_mean, running_var, momentum, eps = options
        y, mean, invstd, reserve, implementation = torch._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch._C._get_cudnn_enabled()
        )
        if on_stats is not None:
            on_stats(mean, invstd)
        hold(ctx, (keep(x), mean, invstd, reserve, implementation, eps, hold_weight(ctx, weight)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None):
        kept, mean, invstd, reserve, implementation, eps, held = take(ctx)
        (grad,) = grads
        if grad is None:
            return (None,) * 6
        weight = weight_of(ctx, held)
        x, kept = kept.dense(), None
        # in training the running statistics are an argument that backward does not read
        grad_x, grad_weight, grad_bias = torch.ops.aten._batch_norm_impl_index_backward.default(
            implementation, x, grad, weight, None, None, mean, invstd, True, eps, ctx.needs_input_grad[:3], reserve
        )
        return grad_x, grad_weight, grad_bias, None, None, None


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
    on_stats: Statistics | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.batch_norm``, bit for bit, that in training keeps its input as ``keep`` makes it.

    input: [N, C, ...] fp32, bf16 or fp16; the others [C] or None, of its dtype or fp32. Running statistics are updated
    as PyTorch updates them. ``keep``: a callable tensor -> Kept (default: the tensor, or whatever the saved-tensor
    hooks in force make of it). ``on_stats(mean, invstd)`` gets the batch's statistics, [C] each, for :func:`bn_apply`.
    Inference, empty batches, other dtypes and tensors with gaps go to PyTorch. Raises what PyTorch raises. Does not
    synchronise.
    """
    if not covered(input, weight, bias, running_mean, running_var) or (keep is None and hooked()):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return run(input, running_mean, running_var, weight, bias, training, momentum, eps, keep or keep_dense, on_stats)


def run(
    x: torch.Tensor,
    running_mean: Vector,
    running_var: Vector,
    weight: Vector,
    bias: Vector,
    training: bool,
    momentum: float,
    eps: float,
    keep: Keep,
    on_stats: Statistics | None = None,
) -> torch.Tensor:
    """:func:`batch_norm` for operands that are covered (:func:`gistkit.nn.eligible.covered`)."""
    if not (training and recorded(x, weight, bias)) or x.dim() < 2 or x.numel() == 0 or not is_dense(x):
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    F._verify_batch_size(x.shape)  # type: ignore[attr-defined]
    options = (running_mean, running_var, momentum, eps)
    return apply(_BatchNorm, x, weight, bias, options, keep, on_stats)


def _over_channels(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return vector.detach().view((1, -1) + (1,) * (x.dim() - 2))


def _fused(x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    """fma(x, alpha, beta): PyTorch's addcmul fuses on the CPU, as its batch norm's compiled loops do."""
    return _multiply_add(x, *_factors(mean, invstd, weight, bias))


def _factors(mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> Any:
    """alpha and beta in fp32."""
    alpha = invstd.float() if weight is None else weight.float() * invstd.float()
    constant = torch.zeros_like(alpha) if bias is None else bias.float()
    if mean.dtype == torch.float32:
        beta = torch.addcmul(constant, mean, alpha, value=-1)
    else:
        beta = constant - mean.float() * alpha
    return alpha, beta


def _multiply_add(x: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """fma(x, alpha, beta) in fp32, rounded once."""
    alpha, beta = _over_channels(alpha, x), _over_channels(beta, x)
    if x.dtype == torch.float32:
        return torch.addcmul(beta, x, alpha)
    wide = x.float()
    return torch.addcmul(beta, wide, alpha, out=wide).to(x.dtype)


def _stepwise(x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    """((x - mean) * invstd) * weight + bias in the statistics' dtype, one rounding each."""
    y = x.to(mean.dtype).contiguous().sub(_over_channels(mean, x)).mul_(_over_channels(invstd, x))
    if weight is not None:
        y = y.mul_(_over_channels(weight, x))
    if bias is not None:
        y = y.add_(_over_channels(bias, x))
    return y.to(x.dtype)


def _centred(x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> torch.Tensor:
    """fma(x - mean, alpha, bias) in fp32, rounded once."""
    alpha = invstd.float() if weight is None else weight.float() * invstd.float()
    constant = torch.zeros_like(alpha) if bias is None else bias.float()
    centred = x.float() - _over_channels(mean.float(), x)
    return torch.addcmul(_over_channels(constant, x), centred, _over_channels(alpha, x), out=centred).to(x.dtype)


def _normalised(
    x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector
) -> torch.Tensor:
    """fma((x - mean) * invstd, weight, bias) in fp32, rounded once."""
    unit = (x.float() - _over_channels(mean.float(), x)).mul_(_over_channels(invstd.float(), x))
    scale = torch.ones_like(invstd, dtype=torch.float32) if weight is None else weight.float()
    constant = torch.zeros_like(scale) if bias is None else bias.float()
    return torch.addcmul(_over_channels(constant, x), unit, _over_channels(scale, x), out=unit).to(x.dtype)


def _elementwise_kernel(
    x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector
) -> torch.Tensor:
    """PyTorch's own CUDA kernel for the elementwise half."""
    return torch.ops.aten.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)


def _by_kernel(form: str, x: torch.Tensor, *constants: Any) -> torch.Tensor:
    return Factors.of(form, *constants)(x)


KERNEL_CANDIDATES: tuple[Rebuild, ...] = tuple(partial(_by_kernel, form) for form in FORMS)
"""gistkit's own kernel in every arithmetic that it knows."""


def rebuild_candidates(x: torch.Tensor) -> list[Rebuild]:
    """Functions (x, mean, invstd, weight, bias) -> batch norm's output, the likeliest for x's device and layout first.

    None of them is to be relied on before it has reproduced a real forward bit for bit.
    """
    if x.device.type == "cuda":
        own = KERNEL_CANDIDATES if x.is_contiguous() or is_channels_last(x) else ()
        return [*own, _elementwise_kernel, _centred, _normalised, _fused, _stepwise]
    if x.is_contiguous():
        return [_fused, _stepwise]
    last = x.dim() in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
    # one alone: the other would take a second copy of x, which a budget has no room for
    return [_fused if last else _stepwise]


class Bound:
    """A batch norm's output from its input by PyTorch's operators; ``constants`` are vectors [C], or None."""

    __slots__ = ("_arithmetic", "_constants")

    def __init__(self, arithmetic: Callable[..., torch.Tensor], *constants: Vector) -> None:
        self._arithmetic, self._constants = arithmetic, constants

    def __call__(self, x: torch.Tensor, channels: slice = slice(None)) -> torch.Tensor:
        """BN(x), of which x has those channels only."""
        return self._arithmetic(x, *(None if v is None else v[channels] for v in self._constants))

    def widens(self, x: torch.Tensor) -> bool:
        """Whether it makes more tensors of x's size than its result, at most four times x's bytes in all."""
        if self._arithmetic is _elementwise_kernel:
            return False
        return x.dtype != torch.float32 or (self._arithmetic is _stepwise and not x.is_contiguous())

    def result_like(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for BN(x)."""
        layout = torch.contiguous_format if self._arithmetic is _stepwise else torch.preserve_format
        return torch.empty_like(x, memory_format=layout)


def bound(
    rebuild: Rebuild,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Vector,
    bias: Vector,
    affine: Vector = None,
) -> tuple[Callable[[torch.Tensor], torch.Tensor], tuple[torch.Tensor, ...]]:
    """(x or rows of it -> batch norm's output, the tensors it holds besides the statistics).

    It holds nothing of weight and bias themselves, which may change: an optimiser may step between forward and
    backward, and PyTorch's batch norm reads no bias there. What depends on no x is computed here, once. ``affine``: a
    copy of weight and bias as one [2C] in fp32, for gistkit's kernel.
    """
    if affine is None:
        weight, bias = None if weight is None else weight.detach(), None if bias is None else bias.detach()
    if rebuild in KERNEL_CANDIDATES:
        factors = Factors.of(rebuild.args[0], mean, invstd, weight, bias, affine)  # type: ignore[attr-defined]
        return factors, (factors.vectors[2],)
    if rebuild is _fused:
        alpha, beta = _factors(mean, invstd, weight, bias)
        return Bound(_multiply_add, alpha, beta), (beta,) if weight is None else (alpha, beta)
    weight, bias = None if weight is None else weight.clone(), None if bias is None else bias.clone()
    own = tuple(t for t in (weight, bias) if t is not None)
    return Bound(rebuild, mean, invstd, weight, bias), own


def bn_apply(
    x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector = None, bias: Vector = None
) -> torch.Tensor:
    """Batch norm's output from its input x [N, C, ...] and the batch's statistics [C], by the likeliest arithmetic.

    In x's dtype; on the CPU with one fp32 temporary of x's size for bf16 and fp16. Not differentiable; does not
    synchronise.
    """
    with torch.no_grad():
        return rebuild_candidates(x)[0](x, mean, invstd, weight, bias)
