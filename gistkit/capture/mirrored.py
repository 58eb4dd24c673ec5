"""What another device than the CPU does differently with the operators of a step that is captured on the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from gistkit.capture.calls import bind

_RESIZES = ("interpolate", "upsample")
_WIDENED = frozenset(
    "__pow__ acos asin cosh cosine_similarity dist erfinv exp expm1 group_norm interpolate layer_norm log log10 log1p "
    "log2 logsumexp norm pow reciprocal renorm rsqrt sinh softplus tan "
    "upsample upsample_bilinear upsample_nearest".split()
)
"""Operators of which CUDA's autocast gives fp32 and the CPU's what they get."""
_NARROW = (torch.float16, torch.bfloat16)
_GIVING_FP32 = frozenset("cumprod cumsum log_softmax softmax softmin sum".split())
"""Those whose result is fp32, by their ``dtype``."""


class MirroredDevice(TorchFunctionMode):
    """While it is active, CPU tensors are cast as tensors of ``device_type`` would be, in autocast contexts around it
    and in those that the model enters, for CUDA by its own list of operators. Afterwards CPU autocast is as before.
    A model's own contexts for the device of its tensors, as ``torch.autocast(x.device.type, enabled=False)``, are the
    CPU's and hold. A group norm saves and gives contiguous tensors, as CUDA's does, where the CPU's knows
    channels_last; an attention that CUDA has no fused kernel for keeps its probabilities."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __enter__(self) -> MirroredDevice:
        self._before = _autocast("cpu")
        self._set = _autocast(self._device_type)
        _set_on_cpu(*self._set)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _set_on_cpu(*self._before)

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _autocast("cpu") == self._set:  # the model has entered no context of its own
            self._set = _autocast(self._device_type)
            _set_on_cpu(*self._set)
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if self._device_type != "cuda":
            return func(*args, **kwargs)
        narrowed = torch.is_autocast_enabled("cpu")
        if narrowed and name in _WIDENED and not (name in _RESIZES and _is_mean(*args, **kwargs)):
            given: Any = tree_map_only(torch.Tensor, _widened, (args, kwargs))
            args, kwargs = given
        elif narrowed and name in _GIVING_FP32 and kwargs.get("dtype") is None and args and args[0].is_floating_point():
            kwargs["dtype"] = torch.float32
        elif narrowed and func is torch.nn.functional.cross_entropy and args[0].dtype != torch.float32:
            return _cross_entropy(*args, **kwargs)
        if name == "group_norm":
            x, *others = args or [kwargs.pop("input")]
            return func(x.contiguous(), *others, **kwargs)
        if name == "scaled_dot_product_attention":
            return _attention(func, *args, **kwargs)
        return _dropout(func, *args, **kwargs) if name == "dropout" else func(*args, **kwargs)


def _dropout(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A dropout as CUDA's, which keeps a mask of bytes instead of what the CPU's multiplies by."""
    bound: Any = bind(func, args, kwargs)
    if bound is None or not bound.training or bound.inplace or not 0 < bound.p < 1 or not bound.x.numel():
        return func(*args, **kwargs)
    return torch.ops.aten.native_dropout(bound.x, bound.p, True)[0]


def _attention(
    func: Callable, query: torch.Tensor, key: torch.Tensor, value: Any, mask: Any = None, dropout: float = 0.0,
    *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """An attention as CUDA keeps it. A fused kernel keeps the seed of a dropout and no mask, so it is captured without
    dropout, for which the CPU has no fused kernel; that of fp32 keeps the mask as additions, expanded to all heads, and
    one whose mask needs a gradient keeps that mask."""
    mask, dropout = kwargs.pop("attn_mask", mask), kwargs.pop("dropout_p", dropout)
    if not _has_fused_kernel(query, key, value, mask, kwargs.get("enable_gqa", False)):
        return _composed(query, key, value, mask, dropout, *args, **kwargs)
    if mask is not None and mask.requires_grad:
        return _with_bias(query, key, value, mask, dropout, **kwargs)
    if dropout:
        torch.rand(2, device=query.device)
    if mask is not None and not _is_narrow(query):
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        mask = _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
    return func(query, key, value, mask, 0.0, *args, **kwargs)


def _composed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """An attention by PyTorch's operators for all devices, one by one: on fake tensors PyTorch adds the mask out of
    place, and the CPU's dropout keeps four bytes an element where CUDA's keeps one."""
    query, key, value, mask = _as_autocast(query, key, value, mask)
    given, root = query.dtype, (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    query, key, value = (t.float() if t.dtype in _NARROW else t for t in (query, key, value))
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    with torch.autocast("cpu", enabled=False):
        scores = (query * root) @ (key.mT * root)
        if mask is not None:
            scores.add_(mask)
        shares = torch.ops.aten._safe_softmax(scores, -1)
        if dropout:
            shares = torch.ops.aten.native_dropout(shares, dropout, True)[0]
        return (shares @ value).to(given)


def _with_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, dropout: float, **words: Any
) -> torch.Tensor:
    """An attention whose mask needs a gradient: CUDA's kernel keeps the mask."""
    query, key, value, bias = _as_autocast(query, key, value, bias)
    bias = _aligned(bias).expand(*query.shape[:-1], key.shape[-2])
    scale = {"scale": words.get("scale")}
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, dropout, **scale)[0]


def _as_autocast(*given: Any) -> list[Any]:
    dtype = torch.get_autocast_dtype("cpu")
    narrow = torch.is_autocast_enabled("cpu")
    return [t.to(dtype) if narrow and t is not None and t.is_floating_point() else t for t in given]


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask, or the copy that CUDA's kernel makes where rows do not lie at multiples of 8 elements."""
    if not any(stride % 8 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _has_fused_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, enable_gqa: bool
) -> bool:
    """Whether CUDA has one, by ``torch._fused_sdp_choice`` of torch 2.11 on an H200, of four dimensions whose last one
    is contiguous, the mask's too. In fp32: heads of a multiple of 4 values, as many for keys as for queries. In bf16
    and fp16 under a mask: heads of a multiple of 8 values; with fewer heads for keys: of at most 256, and no mask that
    needs a gradient."""
    rows = (query, key, value) if mask is None else (query, key, value, mask)
    if query.dim() != 4 or any(t.stride(-1) != 1 for t in rows):
        return False
    width, few = query.shape[-1], enable_gqa and query.shape[-3] != key.shape[-3]
    if not _is_narrow(query):
        return query.dtype is torch.float32 and width % 4 == 0 and not few
    aligned = mask is None or width % 8 == 0
    return aligned and not (few and (width > 256 or (mask is not None and mask.requires_grad)))


def _is_narrow(query: torch.Tensor) -> bool:
    return torch.is_autocast_enabled("cpu") or query.dtype in _NARROW


def _is_mean(*args: Any, mode: str = "nearest", **_: Any) -> bool:
    return "area" in (mode, *args[3:4])


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.is_floating_point() and t.dtype.itemsize < 4 else t


def _cross_entropy(x: torch.Tensor, target: torch.Tensor, **words: Any) -> torch.Tensor:
    """CUDA's takes the logarithms of the probabilities as narrow as x, and the loss of them in fp32. Of probabilities
    as targets, and with smoothed labels, the CPU's."""
    if target.is_floating_point() or words.get("label_smoothing"):
        return torch.nn.functional.cross_entropy(x, target, **words)
    words.pop("label_smoothing", None)
    with torch.autocast("cpu", enabled=False):
        found = torch.log_softmax(x, min(x.dim() - 1, 1))
        return torch.nn.functional.nll_loss(found.float(), target, **words)


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _set_on_cpu(enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)


def autocast_device(tensors: Iterable[torch.Tensor]) -> str | None:
    """The type of the device, not the CPU, whose autocast is meant for a step on ``tensors``; None where it is the
    CPU's own. Tensors on the meta device stand for CUDA's while CUDA's autocast is on, else for the CPU's."""
    found = next((t.device.type for t in tensors if t.device.type != "cpu"), None)
    if found == "meta":
        return "cuda" if torch.is_autocast_enabled("cuda") else None
    return found
