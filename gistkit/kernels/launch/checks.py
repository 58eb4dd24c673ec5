"""What the operators demand of their arguments. A check gets the operator's name and arguments, before the launcher or
the oracle has them (:func:`gistkit.kernels.ops.operator`), and reads no value."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gistkit.formats import (
    CSR_COLUMNS,
    FLOAT_FORMATS,
    INT_BLOCK,
    INT_FORMS,
    INT_UNITS,
    SCALE_BLOCK,
    SCALINGS,
    ZVC_SLOT,
    ZVC_WORDS,
    ceil_div,
    mask1_bytes,
    scale_count,
)
from gistkit.kernels.layout import BIT_DTYPES, code_count, code_dtype, unit_dtype, value_dtype
from gistkit.kernels.sparse.spill import check_spilled

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("scaled", "fused", "split", "centred", "normalised")
"""Arithmetics of a batch norm's elementwise half (:mod:`gistkit.kernels.rebuild.rebuild`)."""
SPARSE_FORMATS = ("raw", *FLOAT_FORMATS)
STRIDES = {"zvc": ZVC_SLOT, "csr": CSR_COLUMNS}
"""Elements of a slot or row, by layout."""


def check_choice(op: str, name: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError unless value is one of those known."""
    if value not in known:
        raise ValueError(f"{op}: {name} must be one of {', '.join(known)}, got {value!r}; pick one of them")


def check_dtype(op: str, name: str, dtype: torch.dtype, demanded: tuple[torch.dtype, ...] = VALUE_DTYPES) -> None:
    """Raise TypeError unless dtype is one of those demanded."""
    if dtype not in demanded:
        wanted = " or ".join(str(d) for d in demanded)
        raise TypeError(f"{op}: {name} must be of dtype {wanted}, got {dtype}; convert it first")


def check_array(
    op: str, name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], length: int | None = None, why: str = ""
) -> None:
    """Raise unless x is flat, of one of the dtypes and, if given, of ``length`` elements to match ``why``."""
    check_dtype(op, name, x.dtype, dtypes)
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be 1-D and contiguous, got shape {tuple(x.shape)} with strides {x.stride()}; "
            "pass gistkit.kernels.layout.flat(x)"
        )
    if length is not None and x.numel() != length:
        raise ValueError(
            f"{op}: {name} must have {length} elements to match {why}, got {x.numel()}; pass the one encoded for it"
        )


def check_values(op: str, x: torch.Tensor) -> None:
    """x: flat values, fp32, bf16 or fp16."""
    check_array(op, "x", x, VALUE_DTYPES)


def check_flags(op: str, b: torch.Tensor) -> None:
    """b: flat flags."""
    check_array(op, "b", b, (torch.bool,))


def check_mask(op: str, mask: torch.Tensor, n: int) -> None:
    """mask: the bytes of an n-element 1-bit mask."""
    check_array(op, "mask", mask, (torch.uint8,), mask1_bytes(n), f"{n} elements")


def check_masked(op: str, grad: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> None:
    """grad: flat values; mask: a bit for each."""
    check_array(op, "grad", grad, VALUE_DTYPES)
    check_mask(op, mask, grad.numel())


def check_narrow(op: str, x: torch.Tensor, fmt: str, scaling: str) -> None:
    """x: flat values; fmt: one of formats.FLOAT_FORMATS; scaling: of formats.SCALINGS."""
    check_values(op, x)
    check_choice(op, "fmt", fmt, FLOAT_FORMATS)
    check_choice(op, "scaling", scaling, SCALINGS)


def check_codes(
    op: str, codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, fmt: str, scaling: str
) -> None:
    """codes, exponents: what ``narrow_encode`` makes of n elements; dtype: one of values."""
    check_choice(op, "fmt", fmt, FLOAT_FORMATS)
    check_choice(op, "scaling", scaling, SCALINGS)
    check_dtype(op, "dtype", dtype)
    check_array(op, "codes", codes, (code_dtype(fmt),), code_count(fmt, n), f"{n} values of {fmt}")
    why = f"{n} codes with scaling {scaling!r}"
    check_array(op, "exponents", exponents, (torch.uint8,), scale_count(n, scaling), why)


def check_fp10(op: str, codes: torch.Tensor) -> None:
    """codes: flat, one an item."""
    check_array(op, "codes", codes, (torch.int16,))


def _check_bits(op: str, bits: int) -> None:
    if bits not in INT_FORMS.values():
        raise ValueError(f"{op}: bits must be one of {', '.join(map(str, INT_FORMS.values()))}, got {bits}; pick one")


def check_int_encode(op: str, x: torch.Tensor, bits: int, seed: int) -> None:
    """x: flat values; bits: 4 or 2; seed: from 0 to 2**24 - 1."""
    check_values(op, x)
    _check_bits(op, bits)
    if not 0 <= seed < 1 << 24:
        raise ValueError(f"{op}: seed must be from 0 to 2**24 - 1, got {seed}; take it modulo 2**24")


def check_int_decode(
    op: str, units: torch.Tensor, lows: torch.Tensor, steps: torch.Tensor, n: int, dtype: torch.dtype, bits: int
) -> None:
    """units, lows, steps: what ``int_encode`` makes of n elements; dtype: one of values."""
    _check_bits(op, bits)
    check_dtype(op, "dtype", dtype)
    blocks, why = ceil_div(n, INT_BLOCK), f"{n} values"
    check_array(op, "units", units, (unit_dtype(bits),), blocks * INT_UNITS, why)
    for name, x in (("lows", lows), ("steps", steps)):
        check_array(op, name, x, (torch.float32,), blocks, why)


def _check_norm(op: str, name: str, norm: list[torch.Tensor], form: str, n: int, plane: int) -> None:
    """norm: a batch norm's mean and 1/std (fp32 [C]), weight and bias (fp32, bf16 or fp16 [C]); form: one of FORMS;
    n elements: whole images of C planes."""
    check_choice(op, f"{name}'s form", form, FORMS)
    if len(norm) != 4:
        raise ValueError(f"{op}: {name} must be mean, 1/std, weight and bias, got {len(norm)} tensors; pass 4")
    channels = norm[0].numel()
    for part, vector in zip(("mean", "1/std", "weight", "bias"), norm, strict=True):
        dtypes = (torch.float32,) if part in ("mean", "1/std") else VALUE_DTYPES
        check_array(op, f"{name}'s {part}", vector, dtypes, channels, f"{channels} channels")
    if plane < 1 or not channels or n % (channels * plane):
        raise ValueError(
            f"{op}: x must be whole images of {channels} channels of {plane} elements, got {n} elements; pass all of it"
        )


def check_rebuild(
    op: str, x: torch.Tensor, norm: list[torch.Tensor], form: str, plane: int, other: torch.Tensor | None,
    other_norm: list[torch.Tensor], other_form: str, relu: bool, out: torch.Tensor,
) -> None:  # fmt: skip
    """Whether the arguments of ``bn_rebuild`` fit together."""
    n = x.numel()
    check_values(op, x)
    _check_norm(op, "norm", norm, form, n, plane)
    for name, t in (("other", other), ("out", out)):
        if t is not None:
            check_array(op, name, t, VALUE_DTYPES, n, f"x of {n} elements")
    if other_norm:
        _check_norm(op, "other_norm", other_norm, other_form, n, plane)


def check_encode(op: str, x: torch.Tensor, fmt: str) -> None:
    """x: flat values; fmt: a value format of sparse storage."""
    check_values(op, x)
    check_choice(op, "fmt", fmt, SPARSE_FORMATS)


def check_compact(
    op: str, scratch: torch.Tensor, counts: torch.Tensor, stride: int, total: int, spill: torch.Tensor | None = None
) -> None:
    """scratch: stride-long slots of items of 1, 2 or 4 bytes; counts: one each; total: no more than all items."""
    if scratch.element_size() not in BIT_DTYPES:
        raise TypeError(
            f"{op}: scratch must have items of 1, 2 or 4 bytes, got {scratch.dtype}; view it as one of these"
        )
    check_dtype(op, "counts", counts.dtype, (torch.int16,))
    if stride not in STRIDES.values():
        raise ValueError(
            f"{op}: stride must be {ZVC_SLOT} (zvc) or {CSR_COLUMNS} (csr), got {stride}; pass the encoding's own"
        )
    slots = counts.numel()
    check_array(op, "scratch", scratch, (scratch.dtype,), slots * stride, f"{slots} slots of {stride}")
    if not 0 <= total <= scratch.numel():
        raise ValueError(f"{op}: total must be between 0 and {scratch.numel()}, got {total}; pass the sum of counts")


def check_lane(
    op: str, lane: torch.Tensor, place: torch.Tensor, values: torch.Tensor | None = None, *others: torch.Tensor | None
) -> None:
    """lane: flat bytes from a multiple of 16 on; place: int64[2]."""
    check_array(op, "lane", lane, (torch.uint8,))
    if lane.data_ptr() % 16:
        raise ValueError(f"{op}: lane must start at a multiple of 16 bytes, got {lane.data_ptr():#x}; cut it there")
    check_array(op, "place", place, (torch.int64,), 2, "what is written there")


def check_ship(
    op: str, scratch: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, stride: int, lane: torch.Tensor,
    begin: torch.Tensor, after: torch.Tensor, place: torch.Tensor, rest: torch.Tensor,
) -> None:  # fmt: skip
    """:func:`check_compact` of scratch, counts, stride; :func:`check_lane` of lane and place, and of rest. index: zvc's
    words or csr's columns. begin, after: int64."""
    check_compact(op, scratch, counts, stride, 0)
    check_lane(op, lane, place)
    check_lane(op, rest, place)
    slots = counts.numel()
    if stride == ZVC_SLOT:
        check_array(op, "words", index, (torch.int32,), slots * ZVC_WORDS, f"{slots} slots")
    else:
        check_array(op, "columns", index, (torch.uint8,), slots * stride, f"{slots} rows")
    needed = 2 * slots + (slots * ZVC_WORDS * 4 if stride == ZVC_SLOT else 0)
    if rest.numel() < needed:
        raise ValueError(f"{op}: rest must have {needed} bytes for {slots} slots, got {rest.numel()}; make it longer")
    for name, cell in (("begin", begin), ("after", after)):
        check_array(op, name, cell, (torch.int64,))


def check_csr_compact(
    op: str, columns: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, total: int,
    spill: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """:func:`check_compact` of both."""
    for scratch in (columns, values):
        check_compact(op, scratch, counts, CSR_COLUMNS, total)


def _check_scaling(
    op: str, values: torch.Tensor, exponents: torch.Tensor, fmt: str, scaling: str, packed: bool
) -> None:
    check_choice(op, "scaling", scaling, SCALINGS)
    if scaling == "none":
        return
    if fmt == "raw" or not packed:
        raise ValueError(
            f"{op}: scaling must be none for fmt='raw' and for packed=False, got {scaling!r} with fmt={fmt!r}, "
            f"packed={packed}; scaled values exist in packed arrays only"
        )
    check_array(op, "exponents", exponents, (torch.uint8,))
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
    """A payload of the layout that ``op`` begins with, of n elements of dtype from slot ``first`` on. ``index``: zvc's
    words, csr's columns."""
    stride, groups = STRIDES[op[:3]], counts.numel()
    check_dtype(op, "dtype", dtype)
    check_array(op, "counts", counts, (torch.int16,))
    if first < 0 or n < 0 or first + ceil_div(n, stride) > groups:
        raise ValueError(
            f"{op}: first and n must name a part of the {groups} groups of {stride} elements, got first={first}, "
            f"n={n}; start at a group and end within the payload"
        )
    items, why = None if packed else groups * stride, "the counts, one slot each (packed=False)"
    if stride == ZVC_SLOT:
        check_array(op, "words", index, (torch.int32,), groups * ZVC_WORDS, f"{groups} slots")
    else:
        check_array(op, "columns", index, (torch.uint8,), items, why)
    check_choice(op, "fmt", fmt, SPARSE_FORMATS)
    check_array(op, "values", values, (value_dtype(fmt, dtype, packed),), items, why)
    _check_scaling(op, values, exponents, fmt, scaling, packed)
    arrays = (values,) if stride == ZVC_SLOT else (values, index)
    check_spilled(op, spill, counts, fmt, scaling, packed, stride, *arrays)


def check_backward(
    op: str, grad: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, values: torch.Tensor,
    exponents: torch.Tensor, out: torch.Tensor, fmt: str, scaling: str, packed: bool, spill: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """grad, out: flat gradients of the tensor that the payload is of."""
    n = grad.numel()
    for name, x in (("grad", grad), ("out", out)):
        check_array(op, name, x, VALUE_DTYPES, n, "the gradient")
    dtype = values.dtype if fmt == "raw" else grad.dtype
    check_payload(op, index, counts, values, exponents, 0, n, dtype, fmt, scaling, packed, spill)
    check_array(op, "counts", counts, (torch.int16,), ceil_div(n, STRIDES[op[:3]]), f"a gradient of {n} elements")
