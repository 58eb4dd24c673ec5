"""Storage order, the one layout that every kernel works in; dtypes of codes; codes below 16 two to a byte."""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, fp10_words

BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By item size in bytes the integer dtype through which bit patterns are seen."""
STRIDES = {"zvc": ZVC_SLOT, "csr": CSR_COLUMNS}
"""Elements of a slot or row, by layout."""
FORMS = ("scaled", "fused", "split", "centred", "normalised")
"""Arithmetics of a batch norm's elementwise half (:mod:`gistkit.kernels.rebuild.rebuild`)."""


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """x's bit patterns: an integer view of the same item size."""
    return x.view(BIT_DTYPES[x.element_size()])


def code_dtype(fmt: str, packed: bool = True) -> torch.dtype:
    """Dtype of an array of codes: fp10 is int32 words of three when packed, int16 else."""
    return {"fp16": torch.int16, "fp10": torch.int32 if packed else torch.int16, "fp8": torch.uint8}[fmt]


def code_count(fmt: str, n: int) -> int:
    """Items of an array of n codes."""
    return fp10_words(n) if fmt == "fp10" else n


def unit_dtype(bits: int) -> torch.dtype:
    """Dtype of a unit of four integers of 4 or 2 bits."""
    return torch.int16 if bits == 4 else torch.uint8


def value_dtype(fmt: str, raw: torch.dtype) -> torch.dtype:
    """Dtype of the values in a sparse payload's slots: raw's own, or that of the codes (int16 for fp10)."""
    return raw if fmt == "raw" else code_dtype(fmt, packed=False)


def padded(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised dtype[n] whose memory goes on to a multiple of 8 items, as many as readers load at once."""
    made = torch.empty((-(-n // 8) * 8,), dtype=dtype, device=device)
    return made if n % 8 == 0 else made[:n]


def is_dense(x: torch.Tensor) -> bool:
    """True where x's elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    return x.layout == torch.strided and (x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x))


def flat(x: torch.Tensor) -> torch.Tensor:
    """The 1-D view of a dense tensor in storage order; no copy. Raises ValueError for a tensor with gaps or overlaps:
    pass ``x.contiguous()`` then."""
    if not is_dense(x):
        raise ValueError(
            f"flat: x must be dense and non-overlapping, got shape {tuple(x.shape)} with strides {x.stride()}; "
            "pass x.contiguous()"
        )
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def is_channels_last(x: torch.Tensor) -> bool:
    """True for a 4-D tensor whose storage order is NHWC and not also NCHW."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def maps_like(x: torch.Tensor, height: int, width: int, channels_last: bool) -> torch.Tensor:
    """Uninitialised maps [N, C, height, width] of x's images, channels, dtype and device."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((*x.shape[:2], height, width), dtype=x.dtype, device=x.device, memory_format=layout)


def nibbles_pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n/2)]: two codes (uint8[n], lower four bits) a byte, first the low nibble."""
    packed = codes[::2] & 15
    packed[: codes.numel() // 2].bitwise_or_(codes[1::2] << 4)
    return packed


def nibbles_unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The first n codes of packed bytes, uint8[n]."""
    return torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:n]
