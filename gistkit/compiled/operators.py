"""Operators of gistkit's graphs that Inductor compiles by rules of :mod:`gistkit.compiled.lowering`.

* ``materialised(x, after, strides)`` is x, as a buffer of its own, once ``after`` has been computed, for what is
  decoded or rebuilt in backward, and for gradients that wait for a segment that runs again: the kernels that read x are
  those that would read a saved x. It is no work: x is stored where it is computed, laid out by ``strides``, as Inductor
  lays out what is saved without telling the graph.
* ``written(x)`` is x, as a buffer that forward writes as plain ``torch.compile`` does one that it saves: fused or not.
* ``rounded(x)`` is x of bf16 or fp16, rounded to that within a kernel that computes in fp32, as what forward read from
  memory and backward computes within a kernel.
* ``moment(variance, count)`` is a variance as Inductor has it in memory, the sum of squared deviations, which every
  kernel that reads the variance divides; ``variance(moment, count)`` is the variance.
* ``short(x)`` is x; what it is computed by counts as one operation where Inductor decides what becomes a buffer, so
  that kernels that decode a tensor are cut as those that read it, and a rebuild has no buffers within (``once``).
* ``pooled`` is ``aten.max_pool2d_with_indices_backward`` of offsets in windows, as forward saves them, not indices.
* ``saturated(x)`` is x as float8_e4m3fn, the largest one where x is larger, as a GPU converts anyhow.
* ``bounded(x, most)`` is x between -most and most, NaN as it is.
* ``convolved`` is a convolution that backward computes anew, under a name of its own, as Inductor lays out a graph's
  images by the convolutions that it finds there. The others are copies outside of Inductor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from gistkit.compiled import compat, lowering

_LIBRARY = torch.library.Library("gistkit", "FRAGMENT")


def _operator(
    schema: str, rule: Callable[..., Any], made: Callable = lambda x, *_: x.clone(), fake: Callable | None = None
) -> Callable[[], Any]:
    """An operator; Inductor knows how to compile it from the first call of what is returned on."""
    name = schema.partition("(")[0]
    _LIBRARY.define(f"{schema} -> Tensor")
    _LIBRARY.impl(name, made, "CompositeExplicitAutograd")
    torch.library.register_fake(f"gistkit::{name}", fake or made, lib=_LIBRARY)

    @cache
    def overload() -> Any:
        found = getattr(torch.ops.gistkit, name).default
        compat.part("register_lowering")(found, type_promotion_kind=None)(rule)
        return found

    return overload


def _laid_out(x: torch.Tensor, after: torch.Tensor, strides: list[int] | None = None) -> torch.Tensor:
    """The result as Inductor lays it out: Inductor copies an operand of a library whose strides it takes for others."""
    return x.clone() if strides is None else torch.empty_strided(x.size(), strides, dtype=x.dtype, device=x.device)


materialised = _operator(
    "materialised(Tensor x, Tensor after, int[]? strides=None)", lowering.materialised, fake=_laid_out
)
writing = _operator("written(Tensor x)", lowering.written)
rounding = _operator("rounded(Tensor x)", lowering.rounded)
taking = _operator("moment(Tensor x, float count)", lowering.moment)
dividing = _operator("variance(Tensor x, float count)", lowering.variance)
shortening = _operator("short(Tensor x, bool once=False)", lowering.short)
saturating = _operator("saturated(Tensor x)", lowering.saturated, lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn))
bounding = _operator("bounded(Tensor x, float most)", lowering.bounded, lambda x, most: x.clamp(-most, most))
pooling = _operator(
    "pooled(Tensor gradient, Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil, "
    "Tensor offsets, bool same)", lowering.pooled, lowering.pooled_by_pytorch,
)  # fmt: skip
convolving = _operator(
    "convolved(Tensor x, Tensor weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups)",
    lowering.convolved, lowering.convolved,
)  # fmt: skip
