"""The operators that a training step of many small layers calls most, past the dispatcher, which takes 3 us a call, and
as much again for the flat views that the operators want. On a plain CUDA tensor that nothing watches the launcher is
called as it is; everything else (the CPU's oracles, fake tensors, dispatch modes) goes to :mod:`gistkit.kernels.ops`.

:class:`Masks` and :class:`Rebuilds` are for callers that meet tensors of one kind (dtype, geometry, device) again and
again: all of a launch but the addresses is made once (:mod:`gistkit.kernels.launch.tiling`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from gistkit.formats import mask1_bytes
from gistkit.kernels import ops
from gistkit.kernels.compat import dispatch_modes
from gistkit.kernels.layout import flat

if TYPE_CHECKING:
    from gistkit.kernels.sparse.lane import Ships
    from gistkit.kernels.sparse.zvc_launches import ZvcLaunches


def _is_plain(x: torch.Tensor) -> bool:
    return x.is_cuda and type(x) is torch.Tensor and not dispatch_modes()


def mask1_backward(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``ops.mask1_backward`` of a dense gradient of any shape, whose geometry the result has."""
    if _is_plain(grad):
        return ops.launchers("mask").mask1_backward(grad, mask)
    return ops.mask1_backward(flat(grad), mask).as_strided(grad.shape, grad.stride())


def bn_rebuild(
    x: torch.Tensor, norm: list[torch.Tensor], form: str, plane: int, other: torch.Tensor | None,
    other_norm: list[torch.Tensor], other_form: str, relu: bool, out: torch.Tensor,
) -> None:  # fmt: skip
    """``ops.bn_rebuild`` of dense x, other and out of one geometry."""
    if _is_plain(x):
        ops.launchers("rebuild").bn_rebuild(x, norm, form, plane, other, other_norm, other_form, relu, out)
    else:
        there = None if other is None else flat(other)
        ops.bn_rebuild(flat(x), norm, form, plane, there, other_norm, other_form, relu, flat(out))


def sparse(name: str) -> Callable[..., Any]:
    """``ops.name``, of sparse storage, whose first tensor says whether the launcher is called as it is."""
    operator = getattr(ops, name)

    def call(x: torch.Tensor, *args: Any) -> Any:
        return getattr(ops.launchers("sparse"), name)(x, *args) if _is_plain(x) else operator(x, *args)

    return call


def zvc_launches(like: torch.Tensor, n: int, dtype: torch.dtype, fmt: str) -> ZvcLaunches | None:
    """The ready launches for tensors of n elements of a dtype on like's device, values in ``fmt``; None where like is
    no plain CUDA tensor at an address for 16-byte accesses."""
    return _zvc_launches(n, dtype, like.device, fmt) if _is_plain(like) and like.data_ptr() % 16 == 0 else None


@lru_cache(maxsize=1024)
def _zvc_launches(n: int, dtype: torch.dtype, device: torch.device, fmt: str) -> ZvcLaunches:
    return ops.launchers("zvc").ZvcLaunches(n, dtype, device, fmt)


def ships(slots: int, stride: int, bits: torch.dtype, columns: bool, device: int) -> Ships:
    """The ready launches of ``ops.ship`` for scratches of so many slots on the CUDA device of that number."""
    return ops.launchers("lane").ships(slots, stride, bits, columns, device)


class Masks:
    """``ops.relu_mask1``, ``ops.relu_mask1_`` and :func:`mask1_backward` of dense tensors of x's kind."""

    __slots__ = ("_backward", "_empty", "_nbytes", "_relu", "_shape", "_stride")

    def __init__(self, x: torch.Tensor) -> None:
        self._shape, self._stride = x.shape, x.stride()
        self._empty = torch.empty((0,), dtype=torch.uint8, device=x.device).new_empty
        self._nbytes = mask1_bytes(x.numel())
        self._relu: Any = None
        self._backward: Any = None

    def relu_(self, x: torch.Tensor) -> torch.Tensor:
        """The mask of x, which is overwritten by relu(x)."""
        return self._rectified(x, x) if _is_plain(x) else ops.relu_mask1_(flat(x))

    def relu(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not _is_plain(x):
            values, mask = ops.relu_mask1(flat(x))
            # detached: a view made in a Function's forward would refuse to be modified in place later
            return values.as_strided(self._shape, self._stride).detach(), mask
        y = torch.empty_like(x)
        return y, self._rectified(x, y)

    def _rectified(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._relu is None:
            self._relu = ops.launchers("mask").repeated_relu(x)
        mask = self._empty(self._nbytes)
        self._relu(x, y, mask)
        return mask

    def backward(self, grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """grad, of x's shape and dtype, where the bit is set, else +0; of x's strides."""
        ours = grad.stride() != self._stride
        if ours:  # a copy, which is masked where it is
            grad = torch.empty_strided(self._shape, self._stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        if not _is_plain(grad):
            if not ours:
                return mask1_backward(grad, mask)
            ops.mask1_backward_(flat(grad), mask)
            return grad
        if self._backward is None:
            self._backward = ops.launchers("mask").repeated_backward(grad)
        result = grad if ours else torch.empty_like(grad)
        self._backward(grad, mask, result)
        return result


class Rebuilds:
    """:func:`bn_rebuild` with a ReLU, of dense tensors of one kind in one arithmetic. ``plane``: elements of one
    channel of x that lie together; ``form``, ``other_form``: as there, the latter ``values`` where other is added as it
    is, empty where there is none. A norm: mean, 1/std, weight, bias [C]."""

    __slots__ = ("_launch", "_plane", "form", "other_form")

    def __init__(self, plane: int, form: str, other_form: str) -> None:
        self._plane, self.form, self.other_form = plane, form, other_form
        self._launch: Any = None

    def __call__(
        self, x: torch.Tensor, norm: list[torch.Tensor], other: torch.Tensor | None, other_norm: list[torch.Tensor],
        out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """out, overwritten by relu(BN(x)), relu(BN(x) + other) or relu(BN(x) + BN(other))."""
        if not _is_plain(x):
            kept = self.other_form if other_norm else ""
            bn_rebuild(x, norm, self.form, self._plane, other, other_norm, kept, True, out)
            return out
        if self._launch is None:
            rebuilds = ops.launchers("rebuild")
            self._launch = rebuilds.repeated_rebuild(x, norm[0].numel(), self.form, self._plane, self.other_form)
        self._launch(x, *norm, x if other is None else other, *(other_norm or norm), out)
        return out
