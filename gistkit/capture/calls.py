"""The covered functions: the objects under which users reach them, their arguments by name, the count of their calls.

Capture and runtime must agree on which call is number 17. The rule, shared by both, is that of :func:`is_counted` and
:func:`region_is_open`: a call counts when its function is in :data:`COVERED`, its arguments bind, its first operand is
a tensor, gradients are on and the region's own saved-tensor hooks are on top. A non-reentrant checkpoint pushes hooks
of its own and a reentrant one turns gradients off, so calls inside either are not counted. ``add`` counts only between
two floating tensors of at least two dimensions: no counters, scalars or biases.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten

from gistkit.kernels import is_dense

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]

Pair = tuple[int, int]
OWN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Those of the tensors for which gistkit's operators run in place of PyTorch's."""
PLAIN = (Number, str, bytes, type(None), type(Ellipsis), slice)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
"""Types of arguments that stay as they are however long one keeps them."""


class Relu(NamedTuple):
    """relu; ``inplace`` also where the function says so by its name."""

    x: torch.Tensor
    inplace: bool


class MaxPool2d(NamedTuple):
    """max_pool2d over (N, C, H, W) or (C, H, W); sizes as (height, width)."""

    x: torch.Tensor
    kernel_size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool


class Conv2d(NamedTuple):
    """conv2d; ``padding`` is a pair or one of PyTorch's words ``same`` and ``valid``."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: Pair
    padding: Pair | str
    dilation: Pair
    groups: int


class Linear(NamedTuple):
    """linear over the last dimension of ``x``."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


class BatchNorm(NamedTuple):
    """batch_norm; ``training`` True where the batch's own statistics are used."""

    x: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    training: bool
    momentum: float
    eps: float


class Dropout(NamedTuple):
    """dropout with the probability ``p`` of a zero."""

    x: torch.Tensor
    p: float
    training: bool
    inplace: bool


class Add(NamedTuple):
    """x + alpha * other, written to x where ``inplace``."""

    x: torch.Tensor
    other: Any
    alpha: float
    inplace: bool


Bound = Relu | MaxPool2d | Conv2d | Linear | BatchNorm | Dropout | Add
Binder = Callable[..., Bound]


def pair(value: Any) -> Pair:
    """The size of each of two dimensions, of one number for both or of a sequence."""
    if type(value) is tuple and len(value) == 2:
        return value
    if isinstance(value, int):
        return (value, value)
    return (value[0], value[-1])


def _max_pool2d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    if return_indices:
        raise TypeError("a pool that returns its indices is left to PyTorch")
    kernel = pair(kernel_size)
    step = kernel if stride is None or stride == () or stride == [] else pair(stride)
    return MaxPool2d(input, kernel, step, pair(padding), pair(dilation), ceil_mode)


def _conv2d(input, weight, bias=None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups=1):
    if not (type(stride) is type(padding) is type(dilation) is tuple and len(stride + padding + dilation) == 6):
        padding = padding if isinstance(padding, str) else pair(padding)
        stride, dilation = pair(stride), pair(dilation)
    return Conv2d(input, weight, bias, stride, padding, dilation, groups)


def _functional_batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):
    return BatchNorm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _torch_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    return BatchNorm(input, running_mean, running_var, weight, bias, training, momentum, eps)


_T = torch.Tensor
_ROWS: tuple[tuple[str, Binder, tuple[Callable, ...]], ...] = (
    ("relu", lambda input, inplace=False: Relu(input, inplace), (F.relu,)),
    ("relu", lambda input: Relu(input, False), (torch.relu, _T.relu)),
    ("relu", lambda input: Relu(input, True), (F.relu_, torch.relu_, _T.relu_)),
    ("max_pool2d", _max_pool2d, (F.max_pool2d, torch.max_pool2d)),
    ("conv2d", _conv2d, (F.conv2d, torch.conv2d)),
    ("linear", lambda input, weight, bias=None: Linear(input, weight, bias), (F.linear,)),
    ("batch_norm", _functional_batch_norm, (F.batch_norm,)),
    ("batch_norm", _torch_batch_norm, (torch.batch_norm,)),
    ("dropout", lambda input, p=0.5, training=True, inplace=False: Dropout(input, p, training, inplace), (F.dropout,)),
    ("dropout", lambda input, p, train: Dropout(input, p, train, False), (torch.dropout,)),
    ("dropout", lambda input, p, train: Dropout(input, p, train, True), (torch.dropout_,)),
    ("add", lambda input, other, *, alpha=1: Add(input, other, alpha, True), (_T.add_, _T.__iadd__)),
    (
        "add",
        lambda input, other, *, alpha=1: Add(input, other, alpha, False),
        (torch.add, _T.add, _T.__add__, _T.__radd__),
    ),
)
"""The covered op, how its arguments bind, the functions that take them so."""
COVERED: dict[Callable, str] = {func: op for op, _, functions in _ROWS for func in functions}
_BINDERS: dict[Callable, Binder] = {func: binder for _, binder, functions in _ROWS for func in functions}


def bind(func: Callable, args: tuple, kwargs: dict | None) -> Bound | None:
    """The arguments of a covered call by name, sizes as pairs; in a few microseconds. None for other functions, and
    where they are not of the covered form (``out=``, ``return_indices=True``): PyTorch's own runs, uncounted."""
    try:
        return _BINDERS[func](*args, **(kwargs or {}))
    except (KeyError, TypeError, IndexError):
        return None


def is_counted(bound: Bound | None) -> bool:
    """Whether a call with these operands is counted; :func:`region_is_open` is the other condition."""
    if bound is None or not isinstance(bound.x, torch.Tensor):
        return False
    return type(bound) is not Add or (_is_wide_float(bound.x) and _is_wide_float(bound.other))


def region_is_open(pack: Callable) -> bool:
    """Whether gradients are on and this thread's innermost saved-tensor hooks are those that ``pack`` belongs to."""
    if not torch.is_grad_enabled():
        return False
    top = _top_hooks(False)
    return top is not None and top[0] is pack


def hooks_are_active() -> bool:
    """Whether any saved-tensor hooks are in force on this thread."""
    return _top_hooks(False) is not None


def _is_wide_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.is_floating_point()


def is_split(bound: Bound) -> bool:
    """Whether gistkit's own op takes a call's backward in two halves, weight gradient first (nn.conv, nn.linear)."""
    if not isinstance(bound, (Conv2d, Linear)) or any(t.dtype not in OWN_DTYPES for t in operands(bound)):
        return False
    takes = takes_conv2d if isinstance(bound, Conv2d) else takes_linear
    return takes(bound.x, bound.weight, bound.bias)


def takes_conv2d(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None = None) -> bool:
    """Whether gistkit's own convolution takes operands of these layouts; else PyTorch's runs."""
    return x.dim() in (3, 4) and weight.dim() == 4 and x.numel() > 0 and is_dense(x)


def takes_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """The same of a linear layer."""
    flattens = x.dim() > 2 and x.is_contiguous()
    if not (flattens or (x.dim() == 2 and is_dense(x))) or weight.dim() != 2 or x.numel() == 0 or weight.numel() == 0:
        return False
    return bias is None or bias.dim() == 1


def options(bound: Bound) -> dict:
    """The arguments of a bound call that are no tensors, as JSON can hold them."""
    kept = ((k, v) for k, v in bound._asdict().items() if isinstance(v, (bool, int, float, str, tuple)))
    return {k: list(v) if isinstance(v, tuple) else v for k, v in kept}


GEOMETRY: dict[str, tuple[str, ...]] = {
    "relu": ("inplace",),
    "max_pool2d": ("kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "conv2d": ("stride", "padding", "dilation", "groups"),
    "linear": (),
    "batch_norm": ("training",),
    "dropout": ("training", "inplace"),
    "add": ("inplace",),
}
"""By covered op those of its :func:`options` on which depends what it keeps."""


def operands(bound: Bound) -> list[torch.Tensor]:
    """The tensors of a bound call, in the order of its fields."""
    return [v for v in bound if isinstance(v, torch.Tensor)]


def opaque(args: tuple, kwargs: dict) -> str:
    """The type of the first argument that cannot be stored for a rerun of the call, '' where all can be."""
    known = (torch.Tensor, torch.Generator, *PLAIN)
    return next((type(v).__name__ for v in tree_flatten((args, kwargs))[0] if not isinstance(v, known)), "")
