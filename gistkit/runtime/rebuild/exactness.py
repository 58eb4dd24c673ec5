"""Rebuilds are believed only once they have given a forward's bits, in each shape, dtype and layout and on each device.

A batch norm's arithmetic is one of those that drawn tensors of its kind have told
(:mod:`gistkit.runtime.rebuild.probed`), and
is tried while the batch norm runs: before it, a forward with weights and biases drawn at random, in the memory that the
output is about to take (a network's first ones are one and zero, under which every arithmetic gives the same bits);
after it, the forward itself. Both are compared block by block. A whole recipe is
compared with the forward's output at once, or under a budget, where no second such tensor has room, with a digest of it
when backward rebuilds it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gistkit.capture import BatchNorm
from gistkit.kernels import is_dense
from gistkit.runtime.rebuild.probed import DRAWN_SCALE, Kind, cancelling, gives, told
from gistkit.runtime.rebuild.rebuild import FusedTerm, ReluTerm, Term, builder
from gistkit.runtime.stash.stash import Rows
from gistkit.runtime.stash.verify import Digest, Trial, same_bits

Rebuild = Callable[..., torch.Tensor]


def try_drawn(verified: dict, call: int, b: BatchNorm) -> None:
    """To be called before a batch norm, the covered call of that number, from which something is rebuilt: remembers in
    ``verified`` the arithmetics that give a forward with random weights and biases. Synchronises where it is new."""
    key = _key(call, b)
    if key in verified or not b.training or b.x.dim() < 2 or b.x.numel() == 0 or not is_dense(b.x):
        return
    with torch.no_grad():
        x = b.x.detach()
        able = told(verified, Kind.of(x, b.weight, b.eps))
        drawn = _drawn_forward(x, b.weight, b.bias, b.eps)
        verified[("drawn", *key)] = [c for c in able if gives(c, x, *drawn)]


def arithmetic(verified: dict, call: int, b: BatchNorm, y: torch.Tensor, stats: tuple) -> Rebuild | None:
    """The arithmetic that gives the batch norm's output y, and gave the drawn forward, bit for bit on this device, or
    None. ``stats``: mean and 1/std of the batch. Synchronises where it is new."""
    key = _key(call, b)
    if key not in verified:
        with torch.no_grad():
            x, able = b.x.detach(), verified.pop(("drawn", *key), ())
            verified[key] = next((c for c in able if gives(c, x, y.detach(), *stats, b.weight, b.bias)), None)
    return verified[key]


def _key(call: int, b: BatchNorm) -> tuple:
    x, affine = b.x, None if b.weight is None else b.weight.dtype
    return ("bn", call, x.dtype, x.device, tuple(x.shape), x.stride(), affine, torch._C._get_cudnn_enabled())


def _relu_key(call: int, recipe: tuple, y: torch.Tensor) -> tuple:
    return ("relu", call, recipe, y.dtype, y.device, tuple(y.shape), y.stride())


def _drawn_forward(x: torch.Tensor, weight: Any, bias: Any, eps: float) -> tuple:
    """(output, mean, invstd, weight, bias) of PyTorch's training batch norm of x, its weights like the given ones but
    drawn at random, its biases made to tell arithmetics apart; the caller's random states untouched."""
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Any) -> Any:
        return None if like is None else torch.randn(like.shape, generator=generator).mul_(DRAWN_SCALE).to(like)

    def forward() -> tuple:
        cudnn = torch._C._get_cudnn_enabled()
        return torch._batch_norm_impl_index(x, scale, shift, None, None, True, 0.0, eps, cudnn)[:3]

    scale, shift = drawn(weight), drawn(bias)
    if shift is not None:
        mean, invstd = forward()[1:]
        shift.copy_(cancelling(x, mean, invstd, scale))
    return *forward(), scale, shift


def exact(
    verified: dict, call: int, recipe: tuple, y: torch.Tensor, term: ReluTerm, later: Callable[[], None] | None
) -> Callable[[Rows], torch.Tensor] | None:
    """What rebuilds y, the output of the covered call of that number: in one pass where that gives its bits, else
    operator by operator, else None.

    With ``later`` an unknown one is not tried now but at its first use; ``later()`` is called, and must raise, where no
    way of it is exact then.
    """
    key = _relu_key(call, recipe, y)
    if key not in verified and later is not None:

        def found(number: int | None) -> None:
            verified[key] = number
            if number is None:
                later()

        return Trial([builder(t, y) for t in ways(term)], Digest(y.detach()), found)
    if key not in verified:
        with torch.no_grad():
            same = [same_bits(builder(t, y)(None), y.detach()) for t in ways(term)]
        verified[key] = same.index(True) if any(same) else None
    number = verified[key]
    return None if number is None else builder(ways(term)[number], y)


def known(verified: dict, call: int, recipe: tuple, y: torch.Tensor) -> int | None:
    """The number of the way that is known to rebuild y, the output of that covered call; None where none is."""
    return verified.get(_relu_key(call, recipe, y))


def ways(term: ReluTerm) -> list[Term]:
    """The term in one pass, where there is one, and operator by operator."""
    fused = FusedTerm.of(term)
    return [term] if fused is None else [fused, term]


__all__ = ["arithmetic", "exact", "known", "try_drawn", "ways"]
