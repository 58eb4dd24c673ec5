"""Torch oracle of gistkit.kernels.mask.mask; also what runs on CPU tensors, in blocks of BLOCK elements, so that
temporaries stay in cache. Bit j of byte i belongs to element 8i+j, bits past the last one are 0."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gistkit.formats import ceil_div, mask1_bytes

BLOCK = 1 << 18


def blocks(n: int) -> Iterator[tuple[slice, slice]]:
    """Slices of n elements, and of their mask bytes, that are worked on at a time."""
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        yield slice(start, stop), slice(start // 8, ceil_div(stop, 8))


def _bits(mask: torch.Tensor, items: slice, octets: slice) -> torch.Tensor:
    """bool of the items from the mask's bytes."""
    flags = np.unpackbits(mask[octets].numpy(), count=items.stop - items.start, bitorder="little")
    return torch.from_numpy(flags.view(np.bool_))


def bits_encode(b: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n/8)] from bool[n]."""
    return torch.from_numpy(np.packbits(b.numpy(), bitorder="little"))


def bits_decode(mask: torch.Tensor, n: int) -> torch.Tensor:
    """bool[n] from a mask."""
    return _bits(mask, slice(0, n), slice(None))


def mask1_encode(x: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n/8)] of not (x <= 0), so that NaN passes as in PyTorch (Gist section III-A, Binarize)."""
    mask = x.new_empty((mask1_bytes(x.numel()),), dtype=torch.uint8)
    for items, octets in blocks(x.numel()):
        mask[octets] = bits_encode(torch.le(x[items], 0).logical_not_())
    return mask


def relu_mask1(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(relu(x), its mask). PyTorch's ReLU gives -0.0 for -0.0 on the CPU; CUDA's of torch 2.11 gives +0."""
    return torch.relu(x), mask1_encode(x)


def relu_mask1_(x: torch.Tensor) -> torch.Tensor:
    """The mask of relu(x); x is overwritten by relu(x)."""
    mask = mask1_encode(x)
    torch.relu_(x)
    return mask


def mask1_backward(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """grad where the bit is set, else +0: ``aten.threshold_backward(grad, y, 0)`` with y = the ReLU's output. PyTorch's
    own kernel does the selecting, so that NaN payloads, which it may rewrite in bf16 and fp16, are its own."""
    return _select(grad, mask, torch.empty_like(grad))


def mask1_backward_(grad: torch.Tensor, mask: torch.Tensor) -> None:
    """:func:`mask1_backward` that overwrites its gradient."""
    _select(grad, mask, grad)


def _select(grad: torch.Tensor, mask: torch.Tensor, grad_x: torch.Tensor) -> torch.Tensor:
    for items, octets in blocks(grad.numel()):
        y = _bits(mask, items, octets).to(grad.dtype)
        torch.ops.aten.threshold_backward.grad_input(grad[items], y, 0, grad_input=grad_x[items])
    return grad_x


def dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """grad * (scale where the bit is set, else 0): one fp32 product with scale as fp32, rounded once to its dtype.
    ``F.dropout``'s gradient where scale is 1 / (1 - p) rounded to grad's dtype. NaN and infinity times 0 are NaN."""
    grad_x = torch.empty_like(grad)
    for items, octets in blocks(grad.numel()):
        noise = _bits(mask, items, octets).float().mul_(scale)
        grad_x[items] = noise.mul_(grad[items])
    return grad_x
