"""Sparse storage: the elements whose bit pattern is not 0, and where they stood (Gist section III-A, cDMA).

Values go to a scratch of one slot per count, undefined past it; ``compact`` packs them. Decoding reads either form.
Offsets into packed arrays are the running sum of the counts, taken on the device: nothing waits.

Formats: ``raw`` keeps the bits; ``fp16``, ``fp10``, ``fp8`` are codes (see reference/narrow.py), scaled ones only in
packed arrays, where fp10 is int32 words in planes.

A payload is four flat tensors of one device: ``index`` (zvc's words int32[32 * slots], csr's columns uint8), ``counts``
int16[slots], ``values`` of ``fmt`` and uint8 ``exponents``, empty where scaling is ``none``. Kernels that do not ask
for ``plane`` get 0: launches are looked up by their integers, and the number of stored items is always another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ceil_div
from gistkit.kernels.layout import bits_of, padded
from gistkit.kernels.ops import sparse_arrays
from gistkit.kernels.sparse.compact_kernels import compact_kernel
from gistkit.kernels.sparse.csr_kernels import csr_decode_kernel, csr_encode_kernel
from gistkit.kernels.sparse.ends import ends
from gistkit.kernels.sparse.spill import columns_start
from gistkit.kernels.sparse.values import TRITON_DTYPES
from gistkit.kernels.sparse.zvc_kernels import zvc_decode_kernel, zvc_encode_kernel
from gistkit.kernels.warp.lanes import asm_level, launch_warps

CSR_ROWS = 4  # rows a program
# octets of a lane in flight when csr is read; fp10's three planes make one of 40 bytes, others take 16 to 24
CSR_PIECES = {"raw": 2, "fp16": 2, "fp10": 1, "fp8": 2}
# slots a program of compact
ZVC_SLOTS, CSR_SLOTS = 8, 32
RUN = {1: 16, 2: 8, 4: 4}
"""Neighbours a lane of compact, by bytes an item: no more than one 16-byte store."""
PIECES = {1: 2, 2: 4, 4: 4}
PAIR_PIECES = {1: 1, 2: 2, 4: 4}
"""Runs of a lane that compact loads before the first store, by bytes an item."""
UNBOUNDED = 1 << 62
"""A total that no place reaches, redirected or not."""


def zvc_encode(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the oracle has it (reference/sparse.py), of x fp32/bf16/fp16[n]; slots = ceil(n/1024)."""
    words, counts, values = sparse_arrays("zvc", x, fmt)
    launch_warps(
        zvc_encode_kernel, counts.numel(), x,
        bits_of(x), words.view(torch.uint8), counts, bits_of(values), x.numel(), **_encoding(x, fmt),
    )  # fmt: skip
    return words, counts, values


def csr_encode(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the oracle has it, of x fp32/bf16/fp16[n]; rows = ceil(n/256)."""
    columns, counts, values = sparse_arrays("csr", x, fmt)
    launch_warps(
        csr_encode_kernel, ceil_div(counts.numel(), CSR_ROWS), x,
        bits_of(x), counts, columns, bits_of(values), x.numel(), **_encoding(x, fmt),
    )  # fmt: skip
    return columns, counts, values


def compact(
    scratch: torch.Tensor, counts: torch.Tensor, stride: int, total: int, spill: torch.Tensor | None = None
) -> torch.Tensor:
    """As the oracle has it (reference/sparse.py)."""
    packed = padded(total, scratch.dtype, scratch.device)
    _compact(None, scratch, counts, stride, None, packed, spill)
    return packed


def csr_compact(
    columns: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, total: int, spill: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the oracle has it, in one pass."""
    packed_columns, packed = (padded(total, t.dtype, t.device) for t in (columns, values))
    _compact(columns, values, counts, CSR_COLUMNS, packed_columns, packed, spill)
    return packed_columns, packed


def _compact(columns, values, counts, stride: int, packed_columns, packed, spill) -> None:
    """``columns`` and ``packed_columns`` are None where values alone are packed."""
    pair, total = columns is not None, packed.numel()
    beside = spill if pair and spill is not None else None
    slots = CSR_SLOTS if stride == CSR_COLUMNS else ZVC_SLOTS
    launch_warps(
        compact_kernel, ceil_div(counts.numel(), slots), values,
        columns if pair else bits_of(values), bits_of(values), counts, ends(counts, stride, packed, spill),
        packed_columns if pair else bits_of(packed), bits_of(packed), bits_of(values) if beside is None else beside,
        total if spill is None else UNBOUNDED, counts.numel(), 0 if beside is None else total,
        0 if beside is None else columns_start(values.numel(), total, values.element_size()),
        STRIDE=stride, SLOTS=slots, RUN=RUN[values.element_size()],
        PIECES=(PAIR_PIECES if pair else PIECES)[values.element_size()], COLUMNS=pair, SPILL=beside is not None,
    )  # fmt: skip


def zvc_decode(index, counts, values, exponents, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from zvc's payload: values at 1024 * slot (packed=False) or close together."""
    return _decoded(_read_zvc, (index, counts, values, exponents), n, dtype, fmt, scaling, packed, spill)


def csr_decode(index, counts, values, exponents, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from csr's payload: rows at 256 * row (packed=False) or close together."""
    return _decoded(_read_csr, (index, counts, values, exponents), n, dtype, fmt, scaling, packed, spill)


def zvc_relu_backward(grad, index, counts, values, exponents, out, fmt, scaling, packed, spill=None) -> None:
    """As the oracle has it. out may be grad: programs read what they write before they write it."""
    _read_zvc(bits_of(out), bits_of(grad), (index, counts, values, exponents), grad.dtype, fmt, "none", packed, spill)


def csr_relu_backward(grad, index, counts, values, exponents, out, fmt, scaling, packed, spill=None) -> None:
    """As :func:`zvc_relu_backward`, from csr's payload."""
    _read_csr(bits_of(out), bits_of(grad), (index, counts, values, exponents), grad.dtype, fmt, "none", packed, spill)


def _decoded(read: Callable[..., None], payload: tuple, n: int, dtype: torch.dtype, fmt: str, *form) -> torch.Tensor:
    x = torch.empty((n,), dtype=dtype, device=payload[0].device)
    read(bits_of(x) if fmt == "raw" else x, None, payload, dtype, fmt, *form)
    return x


def _read_zvc(out, grad, payload: tuple, dtype: torch.dtype, fmt: str, scaling: str, packed: bool, spill) -> None:
    """The elements, of dtype, to out, or grad where they let it pass."""
    index, counts, values, exponents = payload
    launch_warps(
        zvc_decode_kernel, counts.numel(), out,
        out, counts if grad is None else grad, index.view(torch.uint8), counts,
        _ends(counts, ZVC_SLOT, values, packed, spill), bits_of(values), exponents, out.numel(), _plane(values, fmt),
        SCALING=scaling, **_reading(out, grad, dtype, fmt, packed, values),
    )  # fmt: skip


def _read_csr(out, grad, payload: tuple, dtype: torch.dtype, fmt: str, scaling: str, packed: bool, spill) -> None:
    """As :func:`_read_zvc`, from csr's payload."""
    index, counts, values, exponents = payload
    # what stands in the spill's place where there is none
    there, columns_at = index, 0
    if spill is not None:
        there, columns_at = spill, columns_start(counts.numel() * CSR_COLUMNS, values.numel(), values.element_size())
    launch_warps(
        csr_decode_kernel, ceil_div(counts.numel(), CSR_ROWS), out,
        out, counts if grad is None else grad, counts, _ends(counts, CSR_COLUMNS, values, packed, spill), index,
        bits_of(values), exponents, there, out.numel(), _plane(values, fmt, spill), columns_at,
        SCALING=scaling, PIECES=CSR_PIECES[fmt], SPILL=spill is not None,
        **_reading(out, grad, dtype, fmt, packed, index, values),
    )  # fmt: skip


def _aligned(*arrays: torch.Tensor) -> bool:
    """Whether eight neighbours of each can be loaded at once from every multiple of 8 on."""
    return all(a.data_ptr() % 16 == 0 for a in arrays)


def _octets(x: torch.Tensor) -> bool:
    """Whether eight neighbours of x can be loaded at once."""
    return _aligned(x) and x.numel() % 8 == 0


def _plane(values: torch.Tensor, fmt: str, spill: torch.Tensor | None = None) -> int:
    """The kernels' ``plane``: words of fp10, the capacity for csr with a spill."""
    return values.numel() if fmt == "fp10" or spill is not None else 0


def _ends(counts, stride: int, values, packed: bool, spill: torch.Tensor | None) -> torch.Tensor:
    """Where each slot's items end; of a scratch they are not read."""
    return ends(counts, stride, values, spill) if packed else counts


def _encoding(x: torch.Tensor, fmt: str) -> dict[str, Any]:
    """What either encoder is compiled for."""
    return {"FMT": fmt, "DTYPE": TRITON_DTYPES[x.dtype], "WIDE": _octets(x), "ASM": asm_level(x)}


def _reading(out, grad, dtype: torch.dtype, fmt: str, packed: bool, *arrays: torch.Tensor) -> dict[str, Any]:
    """What readers are compiled for; arrays: those whose items are read eight at a time."""
    wide = {"WIDE": _aligned(*arrays), "WHOLE": out.numel() % 8 == 0, "GRAD_WIDE": grad is not None and _octets(grad)}
    form = {"FMT": fmt, "PACKED": packed, "DTYPE": TRITON_DTYPES[dtype], "GRAD": grad is not None}
    return {**form, **wide, "ASM": asm_level(out)}
