"""What a launcher demands of its tensors; checked before anything is read or launched."""

from __future__ import annotations

import torch

from gistkit.formats import FLOAT_FORMATS, SCALINGS, fp10_words, mask1_bytes, scale_count

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMS = ("scaled", "fused", "split", "centred", "normalised")
"""Arithmetics of a batch norm's elementwise half (:mod:`gistkit.kernels.rebuild.rebuild`)."""


def check_flat(op: str, name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless x is 1-D and contiguous."""
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(
            f"{op}: {name} must be 1-D and contiguous, got shape {tuple(x.shape)} with strides {x.stride()}; "
            "pass gistkit.kernels.layout.flat(x)"
        )


def check_dtype(op: str, name: str, dtype: torch.dtype, demanded: tuple[torch.dtype, ...] = VALUE_DTYPES) -> None:
    """Raise TypeError unless dtype is one of those demanded."""
    if dtype not in demanded:
        wanted = " or ".join(str(d) for d in demanded)
        raise TypeError(f"{op}: {name} must be of dtype {wanted}, got {dtype}; convert it first")


def check_values(op: str, name: str, x: torch.Tensor) -> None:
    """Raise unless x is a flat tensor of fp32, bf16 or fp16 values."""
    if x.dim() == 1 and x.is_contiguous() and x.dtype in VALUE_DTYPES:
        return
    check_flat(op, name, x)
    check_dtype(op, name, x.dtype)


def check_length(op: str, name: str, x: torch.Tensor, length: int, why: str) -> None:
    """Raise ValueError unless the flat tensor x has exactly ``length`` elements; ``why`` names what it must match."""
    check_flat(op, name, x)
    if x.numel() != length:
        raise ValueError(
            f"{op}: {name} must have {length} elements to match {why}, got {x.numel()}; pass the one encoded for it"
        )


def check_mask(op: str, mask: torch.Tensor, n: int) -> None:
    """Raise unless mask is the bytes of an n-element 1-bit mask."""
    if mask.dtype is torch.uint8 and mask.dim() == 1 and mask.is_contiguous() and mask.numel() == mask1_bytes(n):
        return
    check_dtype(op, "mask", mask.dtype, (torch.uint8,))
    check_length(op, "mask", mask, mask1_bytes(n), f"{n} elements")


def check_narrow(op: str, fmt: str, scaling: str) -> None:
    """Raise ValueError unless fmt is one of formats.FLOAT_FORMATS and scaling of formats.SCALINGS."""
    for name, value, known in (("fmt", fmt, FLOAT_FORMATS), ("scaling", scaling, SCALINGS)):
        if value not in known:
            raise ValueError(f"{op}: {name} must be one of {', '.join(known)}, got {value!r}; pick one of them")


def code_dtype(fmt: str, packed: bool = True) -> torch.dtype:
    """Dtype of an array of codes: fp10 is int32 words of three when packed, int16 else."""
    return {"fp16": torch.int16, "fp10": torch.int32 if packed else torch.int16, "fp8": torch.uint8}[fmt]


def code_count(fmt: str, n: int) -> int:
    """Items of an array of n codes."""
    return fp10_words(n) if fmt == "fp10" else n


def check_codes(codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, fmt: str, scaling: str):
    """Raise unless codes and exponents are what ``narrow_encode`` makes of n elements, and dtype one of values."""
    op = "narrow_decode"
    check_narrow(op, fmt, scaling)
    check_dtype(op, "dtype", dtype)
    check_dtype(op, "codes", codes.dtype, (code_dtype(fmt),))
    check_length(op, "codes", codes, code_count(fmt, n), f"{n} values of {fmt}")
    check_dtype(op, "exponents", exponents.dtype, (torch.uint8,))
    check_length(op, "exponents", exponents, scale_count(n, scaling), f"{n} codes with scaling {scaling!r}")


def check_norm(op: str, name: str, norm: list[torch.Tensor], form: str, n: int, plane: int) -> None:
    """Raise unless norm is a batch norm's mean and 1/std (fp32 [C]), weight and bias (fp32, bf16 or fp16 [C]), form one
    of FORMS, and n elements are whole images of C planes."""
    if form not in FORMS:
        raise ValueError(f"{op}: {name}'s form must be one of {', '.join(FORMS)}, got {form!r}; pick one of them")
    if len(norm) != 4:
        raise ValueError(f"{op}: {name} must be mean, 1/std, weight and bias, got {len(norm)} tensors; pass 4")
    channels = norm[0].numel()
    for part, vector in zip(("mean", "1/std", "weight", "bias"), norm, strict=True):
        statistic = part in ("mean", "1/std")
        check_dtype(op, f"{name}'s {part}", vector.dtype, (torch.float32,) if statistic else VALUE_DTYPES)
        check_length(op, f"{name}'s {part}", vector, channels, f"{channels} channels")
    if plane < 1 or not channels or n % (channels * plane):
        raise ValueError(
            f"{op}: x must be whole images of {channels} channels of {plane} elements, got {n} elements; pass all of it"
        )


def check_rebuild(x, norm: list, form: str, plane: int, other, other_norm: list, other_form: str, out) -> None:
    """Raise unless the arguments of ``bn_rebuild`` fit together."""
    op, n = "bn_rebuild", x.numel()
    check_values(op, "x", x)
    check_norm(op, "norm", norm, form, n, plane)
    for name, t in (("other", other), ("out", out)):
        if t is not None:
            check_values(op, name, t)
            check_length(op, name, t, n, f"x of {n} elements")
    if other_norm:
        check_norm(op, "other_norm", other_norm, other_form, n, plane)
