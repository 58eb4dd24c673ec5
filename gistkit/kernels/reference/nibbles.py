"""Torch oracle of gistkit.kernels.mask.nibbles; also what runs on CPU tensors."""

from __future__ import annotations

import torch

from gistkit.formats import argmax_bytes
from gistkit.kernels.launch.checks import check_dtype, check_flat, check_length


def nibbles_pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n/2)]: two codes (uint8[n], their lower four bits) to a byte, the first in the low nibble.

    The odd one out sits alone in the last byte.
    """
    check_flat("nibbles_pack", "codes", codes)
    check_dtype("nibbles_pack", "codes", codes.dtype, (torch.uint8,))
    packed = codes[::2] & 15
    packed[: codes.numel() // 2].bitwise_or_(codes[1::2] << 4)
    return packed


def nibbles_unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The first n codes of packed bytes, uint8[n]."""
    check_dtype("nibbles_unpack", "packed", packed.dtype, (torch.uint8,))
    check_length("nibbles_unpack", "packed", packed, argmax_bytes(n, 4), f"{n} codes")
    return torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:n]
