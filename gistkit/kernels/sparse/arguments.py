"""What the sparse operators demand of their tensors, for the oracle and the launchers alike; no value is read."""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, SCALE_BLOCK, SCALINGS, ZVC_SLOT, ZVC_WORDS, ceil_div, scale_count
from gistkit.kernels.launch.checks import check_dtype, check_flat, check_length, check_values
from gistkit.kernels.sparse.spill import check_spilled

SPARSE_FORMATS = ("raw", "fp16", "fp10", "fp8")
# item size in bytes -> the integer dtype through which bit patterns are seen
BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CODE_DTYPES = {"fp16": torch.int16, "fp8": torch.uint8}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """x's bit patterns: an integer view of the same item size."""
    return x.view(BIT_DTYPES[x.element_size()])


def value_dtype(fmt: str, raw: torch.dtype, packed: bool = False) -> torch.dtype:
    """Dtype of the values array: raw's own, or that of the codes (fp10 is int16 in slots, int32 words when packed)."""
    if fmt == "raw":
        return raw
    if fmt == "fp10":
        return torch.int32 if packed else torch.int16
    return _CODE_DTYPES[fmt]


def check_fmt(op: str, fmt: str) -> None:
    """Raise ValueError unless fmt names a value format."""
    if fmt not in SPARSE_FORMATS:
        raise ValueError(f"{op}: fmt must be one of {', '.join(SPARSE_FORMATS)}, got {fmt!r}; choose one of these")


def check_encode(op: str, x: torch.Tensor, fmt: str) -> None:
    """Raise unless x is a flat tensor of values and fmt a value format."""
    check_values(op, "x", x)
    check_fmt(op, fmt)


def check_compact(scratch: torch.Tensor, counts: torch.Tensor, stride: int, total: int) -> None:
    """Raise unless scratch is stride-long slots of items of 1, 2 or 4 bytes, one count each."""
    check_flat("compact", "scratch", scratch)
    if scratch.element_size() not in BIT_DTYPES:
        raise TypeError(
            f"compact: scratch must have items of 1, 2 or 4 bytes, got {scratch.dtype}; view it as one of these"
        )
    check_dtype("compact", "counts", counts.dtype, (torch.int16,))
    if stride not in (ZVC_SLOT, CSR_COLUMNS):
        raise ValueError(
            f"compact: stride must be {ZVC_SLOT} (zvc) or {CSR_COLUMNS} (csr), got {stride}; pass the encoding's own"
        )
    check_length("compact", "scratch", scratch, counts.numel() * stride, f"{counts.numel()} slots of {stride}")
    if not 0 <= total <= scratch.numel():
        raise ValueError(f"compact: total must be between 0 and {scratch.numel()}, got {total}; pass the sum of counts")


def check_blocks(op: str, scratch: torch.Tensor, counts: torch.Tensor, stride: int, total: int, fmt: str) -> None:
    """Raise unless scratch is stride-long slots of values, one count each, and fmt has codes of whole bytes."""
    check_values(op, "scratch", scratch)
    check_compact(scratch, counts, stride, total)
    if fmt not in _CODE_DTYPES:
        raise ValueError(f"{op}: fmt must be one of {', '.join(_CODE_DTYPES)}, got {fmt!r}; choose one of these")


def _check_values(op: str, values: torch.Tensor, slot_items: int, dtype: torch.dtype, fmt: str, packed: bool) -> None:
    check_fmt(op, fmt)
    check_dtype(op, "values", values.dtype, (value_dtype(fmt, dtype, packed),))
    if packed:
        check_flat(op, "values", values)
    else:
        check_length(op, "values", values, slot_items, "the counts, one slot each (packed=False)")


def _check_scaling(
    op: str, values: torch.Tensor, exponents: torch.Tensor, fmt: str, scaling: str, packed: bool
) -> None:
    if scaling not in SCALINGS:
        raise ValueError(f"{op}: scaling must be one of {', '.join(SCALINGS)}, got {scaling!r}; choose one of these")
    if scaling == "none":
        return
    if fmt == "raw" or not packed:
        raise ValueError(
            f"{op}: scaling must be none for fmt='raw' and for packed=False, got {scaling!r} with fmt={fmt!r}, "
            f"packed={packed}; scaled values exist in packed arrays only"
        )
    check_dtype(op, "exponents", exponents.dtype, (torch.uint8,))
    check_flat(op, "exponents", exponents)
    # packed fp10 fills up its planes: as many words hold 3 * SCALE_BLOCK different numbers of codes, this the least
    codes = max(3 * (values.numel() - SCALE_BLOCK) + 1, 0) if fmt == "fp10" else values.numel()
    needed = scale_count(codes, scaling)
    if exponents.numel() < needed:
        raise ValueError(
            f"{op}: exponents must have {needed} elements to match {codes} {fmt} codes scaled per {scaling}, "
            f"got {exponents.numel()}; pass the ones encoded with them"
        )


def check_zvc(
    op: str,
    words: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    n: int,
    dtype: torch.dtype,
    fmt: str,
    scaling: str,
    packed: bool,
    spill: torch.Tensor | None = None,
) -> None:
    """Raise unless the payload is one of zvc for n elements of dtype."""
    slots = ceil_div(n, ZVC_SLOT)
    check_dtype(op, "dtype", dtype)
    check_dtype(op, "words", words.dtype, (torch.int32,))
    check_dtype(op, "counts", counts.dtype, (torch.int16,))
    check_length(op, "words", words, slots * ZVC_WORDS, f"{n} elements")
    check_length(op, "counts", counts, slots, f"{n} elements")
    _check_values(op, values, slots * ZVC_SLOT, dtype, fmt, packed)
    _check_scaling(op, values, exponents, fmt, scaling, packed)
    check_spilled(op, spill, counts, fmt, scaling, packed, ZVC_SLOT, values)


def check_csr(
    op: str,
    counts: torch.Tensor,
    columns: torch.Tensor,
    values: torch.Tensor,
    exponents: torch.Tensor,
    n: int,
    dtype: torch.dtype,
    fmt: str,
    scaling: str,
    packed: bool,
    spill: torch.Tensor | None = None,
) -> None:
    """Raise unless the payload is one of csr for n elements of dtype."""
    rows = ceil_div(n, CSR_COLUMNS)
    check_dtype(op, "dtype", dtype)
    check_dtype(op, "counts", counts.dtype, (torch.int16,))
    check_dtype(op, "columns", columns.dtype, (torch.uint8,))
    check_length(op, "counts", counts, rows, f"{n} elements")
    if packed:
        check_flat(op, "columns", columns)
    else:
        check_length(op, "columns", columns, rows * CSR_COLUMNS, f"{n} elements (packed=False)")
    _check_values(op, values, rows * CSR_COLUMNS, dtype, fmt, packed)
    _check_scaling(op, values, exponents, fmt, scaling, packed)
    check_spilled(op, spill, counts, fmt, scaling, packed, CSR_COLUMNS, values, columns)
