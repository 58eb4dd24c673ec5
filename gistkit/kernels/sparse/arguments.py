"""What the sparse operators demand of their tensors, for the oracle and the launchers alike; no value is read."""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, SCALE_BLOCK, SCALINGS, ZVC_SLOT, ZVC_WORDS, ceil_div, scale_count
from gistkit.kernels.launch.checks import check_dtype, check_flat, check_length, check_values, code_dtype
from gistkit.kernels.sparse.spill import check_spilled

SPARSE_FORMATS = ("raw", "fp16", "fp10", "fp8")
STRIDES = {"zvc": ZVC_SLOT, "csr": CSR_COLUMNS}
"""Elements of a slot or row, by layout."""
# item size in bytes -> the integer dtype through which bit patterns are seen
BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """x's bit patterns: an integer view of the same item size."""
    return x.view(BIT_DTYPES[x.element_size()])


def value_dtype(fmt: str, raw: torch.dtype, packed: bool = False) -> torch.dtype:
    """Dtype of the values array: raw's own, or that of the codes (fp10 is int16 in slots, int32 words when packed)."""
    return raw if fmt == "raw" else code_dtype(fmt, packed)


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


def check_payload(
    op: str, index: torch.Tensor, counts: torch.Tensor, values: torch.Tensor, exponents: torch.Tensor, first: int,
    n: int, dtype: torch.dtype, fmt: str, scaling: str, packed: bool, spill: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise unless the payload is one of the layout that ``op`` begins with and holds n elements of dtype from slot
    ``first`` on. ``index``: zvc's words, csr's columns."""
    stride, groups = STRIDES[op[:3]], counts.numel()
    check_dtype(op, "dtype", dtype)
    check_flat(op, "counts", counts)
    check_dtype(op, "counts", counts.dtype, (torch.int16,))
    if first < 0 or n < 0 or first + ceil_div(n, stride) > groups:
        raise ValueError(
            f"{op}: first and n must name a part of the {groups} groups of {stride} elements, got first={first}, "
            f"n={n}; start at a group and end within the payload"
        )
    if stride == ZVC_SLOT:
        check_dtype(op, "words", index.dtype, (torch.int32,))
        check_length(op, "words", index, groups * ZVC_WORDS, f"{groups} slots")
    else:
        check_dtype(op, "columns", index.dtype, (torch.uint8,))
        if packed:
            check_flat(op, "columns", index)
        else:
            check_length(op, "columns", index, groups * stride, f"{groups} rows (packed=False)")
    _check_values(op, values, groups * stride, dtype, fmt, packed)
    _check_scaling(op, values, exponents, fmt, scaling, packed)
    check_spilled(
        op, spill, counts, fmt, scaling, packed, stride, *((values,) if stride == ZVC_SLOT else (values, index))
    )


def check_backward(op: str, grad: torch.Tensor, payload: tuple, out: torch.Tensor, form: tuple) -> None:
    """Raise unless grad and out are flat gradients of the tensor that the payload is of."""
    n, values, fmt = grad.numel(), payload[2], form[0]
    for name, x in (("grad", grad), ("out", out)):
        check_values(op, name, x)
        check_length(op, name, x, n, "the gradient")
    check_payload(op, *payload, 0, n, values.dtype if fmt == "raw" else grad.dtype, *form)
    stride = STRIDES[op[:3]]
    check_length(op, "counts", payload[1], ceil_div(n, stride), f"a gradient of {n} elements")
