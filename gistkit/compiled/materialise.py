"""Operators of backward's graphs that keep Inductor's arithmetic as it is in plain ``torch.compile``.

``gistkit::materialised(x, after, strides)`` is x, as a buffer of its own, once ``after`` has been computed.

What is decoded or rebuilt in backward goes through it. The kernels that read x are then the ones that would read a
saved x, so their arithmetic is that of plain ``torch.compile``, roundings to bf16 and orders of summation included.
Inductor compiles it to no work at all: x is stored where it is computed, laid out by ``strides``, as Inductor lays out
what is saved without telling the graph. Elsewhere it is a copy.

``gistkit::written(x)`` is x, as a buffer that forward writes, though it may be fused with others: what plain
``torch.compile`` does with a tensor that it saves. Where gistkit saves it no more, forward's kernels stay as they are.

``gistkit::rounded(x)`` is x of bf16 or fp16, rounded to that within a kernel that computes in fp32. What forward read
from memory and backward computes within a kernel goes through it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gistkit.compiled import compat

_LIBRARY = torch.library.Library("gistkit", "FRAGMENT")
_LIBRARY.define("materialised(Tensor x, Tensor after, int[]? strides=None) -> Tensor")


def _copy(x: torch.Tensor, after: torch.Tensor, strides: list[int] | None = None) -> torch.Tensor:
    return x.clone()


def _laid_out(x: torch.Tensor, after: torch.Tensor, strides: list[int] | None = None) -> torch.Tensor:
    """The result as Inductor lays it out: Inductor copies an operand of a library whose strides it takes for others."""
    return x.clone() if strides is None else torch.empty_strided(x.size(), strides, dtype=x.dtype, device=x.device)


_LIBRARY.impl("materialised", _copy, "CompositeExplicitAutograd")
torch.library.register_fake("gistkit::materialised", _laid_out, lib=_LIBRARY)


@cache
def materialised() -> Any:
    """The operator; Inductor knows how to compile it from the first call on."""
    overload = torch.ops.gistkit.materialised.default
    compat.register_materialised_lowering(overload)
    return overload


_LIBRARY.define("rounded(Tensor x) -> Tensor")
_LIBRARY.impl("rounded", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("gistkit::rounded", lambda x: x.clone(), lib=_LIBRARY)


@cache
def rounding() -> Any:
    """The operator ``rounded``; Inductor knows how to compile it from the first call on."""
    overload = torch.ops.gistkit.rounded.default
    compat.register_rounded_lowering(overload)
    return overload


_LIBRARY.define("written(Tensor x) -> Tensor")
_LIBRARY.impl("written", lambda x: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("gistkit::written", lambda x: x.clone(), lib=_LIBRARY)


@cache
def writing() -> Any:
    """The operator ``written``; Inductor knows how to compile it from the first call on."""
    overload = torch.ops.gistkit.written.default
    compat.register_written_lowering(overload)
    return overload
