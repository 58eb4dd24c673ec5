"""Sparse storage read back: whole payloads and parts of them, and ReLU's backward.

Offsets into packed arrays are absolute, so a launch over some slots needs nothing but the slots' own counts and ends.
Where a payload has a spill (:mod:`gistkit.kernels.sparse.spill`), the slots' ends are redirected and csr's kernels get
the columns' run; nothing else differs. Kernels that do not ask for ``plane`` get 0: launches are looked up by their
integers, and the number of stored items is another one at every step.

A payload is four flat tensors of one device: ``index`` (zvc's words int32[32 * slots], csr's columns uint8), ``counts``
int16[slots], ``values`` of ``fmt`` and uint8 ``exponents``. It is checked before a launch
(:mod:`gistkit.kernels.sparse.arguments`: ValueError, TypeError). Nothing here synchronises.
"""

from __future__ import annotations

from typing import Any

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.sparse.arguments import bits_of, check_backward, check_payload
from gistkit.kernels.sparse.csr_readers import csr_backward_kernel, csr_decode_kernel
from gistkit.kernels.sparse.ends import ends
from gistkit.kernels.sparse.spill import columns_start
from gistkit.kernels.sparse.values import TRITON_DTYPES
from gistkit.kernels.sparse.zvc_kernels import zvc_backward_kernel, zvc_decode_kernel
from gistkit.kernels.warp.lanes import asm_level, launch_warps

CSR_ROWS = 4  # rows a program
# octets of a lane in flight when csr is read; fp10's three planes make one of 40 bytes, others take 16 to 24
CSR_PIECES = {"raw": 2, "fp16": 2, "fp10": 1, "fp8": 2}


def _item_view(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """What a kernel sees of x: bit patterns where they are only moved."""
    return bits_of(x) if fmt == "raw" else x


def _aligned(*arrays: torch.Tensor) -> bool:
    """Whether eight neighbours of each can be loaded at once from every multiple of 8 on."""
    return all(a.data_ptr() % 16 == 0 for a in arrays)


def octets(x: torch.Tensor) -> bool:
    """Whether eight neighbours of x can be loaded at once."""
    return _aligned(x) and x.numel() % 8 == 0


def _plane(values: torch.Tensor, fmt: str, spill: torch.Tensor | None = None) -> int:
    """The kernels' ``plane``: words of fp10, the capacity for csr with a spill."""
    return values.numel() if fmt == "fp10" or spill is not None else 0


def _ends(counts, stride: int, values, packed: bool, spill: torch.Tensor | None) -> torch.Tensor:
    """Where each slot's items end; of a scratch they are not read."""
    return ends(counts, stride, values, spill) if packed else counts


def _constants(x: torch.Tensor, n: int, fmt: str, packed: bool, *arrays: torch.Tensor) -> dict[str, Any]:
    """What every kernel here is compiled for: x's device, n elements, arrays whose items are read eight at a time."""
    return {"FMT": fmt, "PACKED": packed, "WIDE": _aligned(*arrays), "WHOLE": n % 8 == 0, "ASM": asm_level(x)}


def _csr_spill(counts, columns, values, spill: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """csr's spill, or what stands in its place, and the bytes of it before its run of columns."""
    if spill is None:
        return columns, 0
    return spill, columns_start(counts.numel() * CSR_COLUMNS, values.numel(), values.element_size())


def zvc_decode(index, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from slot ``first`` of zvc's payload on: values at 1024 * slot (packed=False) or close together."""
    check_payload("zvc_decode", index, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill)
    x = torch.empty((n,), dtype=dtype, device=values.device)
    ends, items = _ends(counts, ZVC_SLOT, values, packed, spill), values
    if first or counts.numel() != ceil_div(n, ZVC_SLOT):
        slots = slice(first, first + ceil_div(n, ZVC_SLOT))
        index, counts, ends = index[first * ZVC_WORDS :], counts[slots], ends[slots]
        items = values if packed else values[first * ZVC_SLOT :]
    launch_warps(
        zvc_decode_kernel, ceil_div(n, ZVC_SLOT), x,
        _item_view(x, fmt), index.view(torch.uint8), counts, ends, bits_of(items), exponents, n, _plane(values, fmt),
        FMT=fmt, SCALING=scaling, PACKED=packed, DTYPE=TRITON_DTYPES[dtype], WIDE=_aligned(items), WHOLE=n % 8 == 0,
    )  # fmt: skip
    return x


def csr_decode(index, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from row ``first`` of csr's payload on: rows at 256 * row (packed=False) or close together."""
    check_payload("csr_decode", index, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill)
    if spill is not None and first % CSR_ROWS:
        # a program reads its rows as one run, and those of a group alone are one
        before = first % CSR_ROWS
        skipped, first = before * CSR_COLUMNS, first - before
        args = (first, n + skipped, dtype, fmt, scaling, packed, spill)
        return csr_decode(index, counts, values, exponents, *args)[skipped:]
    x = torch.empty((n,), dtype=dtype, device=values.device)
    rows = slice(first, first + ceil_div(n, CSR_COLUMNS))
    skipped = 0 if packed else first * CSR_COLUMNS
    columns, items = index[skipped:], values[skipped:]
    there, columns_at = _csr_spill(counts, columns, values, spill)
    launch_warps(
        csr_decode_kernel, ceil_div(ceil_div(n, CSR_COLUMNS), CSR_ROWS), x,
        _item_view(x, fmt), counts[rows], _ends(counts, CSR_COLUMNS, values, packed, spill)[rows], columns,
        bits_of(items), exponents, there, n, _plane(values, fmt, spill), columns_at,
        SCALING=scaling, DTYPE=TRITON_DTYPES[dtype], PIECES=CSR_PIECES[fmt], SPILL=spill is not None,
        **_constants(x, n, fmt, packed, columns, items),
    )  # fmt: skip
    return x


def zvc_relu_backward(grad, index, counts, values, exponents, out, fmt, scaling, packed, spill=None) -> None:
    """out[n] = grad[n] where an element was stored that is not a negative zero, else +0: ReLU's backward.

    Exact under the lossy formats too: a small positive value may have become the code +0, but its bit is set. out may
    be grad: programs read what they write before they write it.
    """
    payload, n = (index, counts, values, exponents), grad.numel()
    check_backward("zvc_relu_backward", grad, payload, out, (fmt, scaling, packed, spill))
    launch_warps(
        zvc_backward_kernel, counts.numel(), grad,
        bits_of(out), bits_of(grad), index.view(torch.uint8), counts, _ends(counts, ZVC_SLOT, values, packed, spill),
        bits_of(values), n, _plane(values, fmt), GRAD_WIDE=octets(grad), **_constants(grad, n, fmt, packed, values),
    )  # fmt: skip


def csr_relu_backward(grad, index, counts, values, exponents, out, fmt, scaling, packed, spill=None) -> None:
    """As :func:`zvc_relu_backward`, from csr's payload."""
    payload, n = (index, counts, values, exponents), grad.numel()
    check_backward("csr_relu_backward", grad, payload, out, (fmt, scaling, packed, spill))
    there, columns_at = _csr_spill(counts, index, values, spill)
    launch_warps(
        csr_backward_kernel, ceil_div(counts.numel(), CSR_ROWS), grad,
        bits_of(out), bits_of(grad), counts, _ends(counts, CSR_COLUMNS, values, packed, spill), index,
        bits_of(values), there, n, _plane(values, fmt, spill), columns_at,
        GRAD_WIDE=octets(grad), PIECES=CSR_PIECES[fmt], SPILL=spill is not None,
        **_constants(grad, n, fmt, packed, index, values),
    )  # fmt: skip
