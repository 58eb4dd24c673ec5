"""Sparse storage read back: the launches of whole payloads and of parts of them, and ReLU's backward.

Where a payload has a spill (:mod:`gistkit.kernels.sparse.spill`), the slots' ends are redirected and csr's kernels are
told of
the columns' run; nothing else differs. Kernels that do not ask for ``plane`` get 0: launches are looked up by their
integers, and the number of stored items is another one at every step.

Payloads are flat tensors of one device, as the oracle of each name has them: zvc's ``words`` int32[32 * slots] and
``counts`` int16[slots], csr's ``counts`` int16[rows] and ``columns`` uint8; ``values`` of ``fmt`` and uint8
``exponents``. They are checked before a launch (:mod:`gistkit.kernels.sparse.arguments`: ValueError, TypeError).
Nothing here synchronises.
"""

from __future__ import annotations

from typing import Any

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.launch.checks import check_values
from gistkit.kernels.sparse.arguments import bits_of, check_csr, check_zvc
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
    return x.is_cuda and _aligned(x) and x.numel() % 8 == 0


def _plane(values: torch.Tensor, fmt: str, spill: torch.Tensor | None = None) -> int:
    """The kernels' ``plane``: words of fp10, the capacity for csr with a spill."""
    return values.numel() if fmt == "fp10" or spill is not None else 0


def _columns_at(counts: torch.Tensor, values: torch.Tensor, spill: torch.Tensor | None) -> int:
    """Bytes of csr's spill before its run of columns."""
    whole = counts.numel() * CSR_COLUMNS
    return 0 if spill is None else columns_start(whole, values.numel(), values.element_size())


def _ends(counts, stride: int, values, packed: bool, spill: torch.Tensor | None) -> torch.Tensor:
    """Where each slot's items end; in a scratch nobody asks."""
    return ends(counts, stride, values, spill) if packed else counts


def _constants(x: torch.Tensor, n: int, fmt: str, packed: bool, *arrays: torch.Tensor) -> dict[str, Any]:
    """What every kernel here is compiled for: x's device, n elements, arrays whose items are read eight at a time."""
    return {"FMT": fmt, "PACKED": packed, "WIDE": _aligned(*arrays), "WHOLE": n % 8 == 0, "ASM": asm_level(x)}


def decode_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from slot ``first`` of a checked zvc payload on."""
    x = torch.empty((n,), dtype=dtype, device=values.device)
    ends, items = _ends(counts, ZVC_SLOT, values, packed, spill), values
    if first or counts.numel() != ceil_div(n, ZVC_SLOT):
        slots = slice(first, first + ceil_div(n, ZVC_SLOT))
        words, counts, ends = words[first * ZVC_WORDS :], counts[slots], ends[slots]
        items = values if packed else values[first * ZVC_SLOT :]
    launch_warps(
        zvc_decode_kernel,
        ceil_div(n, ZVC_SLOT),
        x,
        _item_view(x, fmt),
        words.view(torch.uint8),
        counts,
        ends,
        bits_of(items),
        exponents,
        n,
        _plane(values, fmt),
        SCALING=scaling,
        DTYPE=TRITON_DTYPES[dtype],
        **_constants(x, n, fmt, packed, items),
    )
    return x


def decode_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from row ``first`` of a checked csr payload on."""
    if spill is not None and first % CSR_ROWS:
        # a program reads its rows as one run, and those of a group alone are one
        before = first % CSR_ROWS
        skipped, first = before * CSR_COLUMNS, first - before
        args = (first, n + skipped, dtype, fmt, scaling, packed, spill)
        return decode_rows(counts, columns, values, exponents, *args)[skipped:]
    x = torch.empty((n,), dtype=dtype, device=values.device)
    rows = slice(first, first + ceil_div(n, CSR_COLUMNS))
    skipped = 0 if packed else first * CSR_COLUMNS
    columns, values = columns[skipped:], values[skipped:]
    launch_warps(
        csr_decode_kernel,
        ceil_div(ceil_div(n, CSR_COLUMNS), CSR_ROWS),
        x,
        _item_view(x, fmt),
        counts[rows],
        _ends(counts, CSR_COLUMNS, values, packed, spill)[rows],
        columns,
        bits_of(values),
        exponents,
        columns if spill is None else spill,
        n,
        _plane(values, fmt, spill),
        _columns_at(counts, values, spill),
        SCALING=scaling,
        DTYPE=TRITON_DTYPES[dtype],
        PIECES=CSR_PIECES[fmt],
        SPILL=spill is not None,
        **_constants(x, n, fmt, packed, columns, values),
    )
    return x


def zvc_decode(words, counts, values, exponents, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from zvc's payload: values at 1024*slot (packed=False) or close together (packed=True)."""
    check_zvc("zvc_decode", words, counts, values, exponents, n, dtype, fmt, scaling, packed, spill)
    return decode_slots(words, counts, values, exponents, 0, n, dtype, fmt, scaling, packed, spill)


def csr_decode(counts, columns, values, exponents, n, dtype, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """dtype[n] from csr's payload: rows at 256*row (packed=False) or close together (packed=True)."""
    check_csr("csr_decode", counts, columns, values, exponents, n, dtype, fmt, scaling, packed, spill)
    return decode_rows(counts, columns, values, exponents, 0, n, dtype, fmt, scaling, packed, spill)


def zvc_relu_backward(grad, words, counts, values, exponents, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """grad[n] where an element was stored that is not a negative zero, else +0: ReLU's backward from its output.

    Exact under the lossy formats too: a small positive value may have become the code +0, but its bit is set.
    """
    grad_x = torch.empty_like(grad)
    _mask_zvc("zvc_relu_backward", grad, grad_x, words, counts, values, exponents, fmt, scaling, packed, spill)
    return grad_x


def zvc_relu_backward_(grad, words, counts, values, exponents, fmt, scaling, packed, spill=None) -> None:
    """:func:`zvc_relu_backward` that overwrites its gradient: programs read what they write before they write it."""
    _mask_zvc("zvc_relu_backward_", grad, grad, words, counts, values, exponents, fmt, scaling, packed, spill)


def _mask_zvc(op, grad, grad_x, words, counts, values, exponents, fmt, scaling, packed, spill) -> None:
    n, dtype = grad.numel(), values.dtype if fmt == "raw" else grad.dtype
    check_values(op, "grad", grad)
    check_zvc(op, words, counts, values, exponents, n, dtype, fmt, scaling, packed, spill)
    launch_warps(
        zvc_backward_kernel,
        counts.numel(),
        grad,
        bits_of(grad_x),
        bits_of(grad),
        words.view(torch.uint8),
        counts,
        _ends(counts, ZVC_SLOT, values, packed, spill),
        bits_of(values),
        n,
        _plane(values, fmt),
        GRAD_WIDE=octets(grad),
        **_constants(grad, n, fmt, packed, values),
    )


def csr_relu_backward(grad, counts, columns, values, exponents, fmt, scaling, packed, spill=None) -> torch.Tensor:
    """As :func:`zvc_relu_backward`, from csr's payload."""
    grad_x = torch.empty_like(grad)
    _mask_csr("csr_relu_backward", grad, grad_x, counts, columns, values, exponents, fmt, scaling, packed, spill)
    return grad_x


def csr_relu_backward_(grad, counts, columns, values, exponents, fmt, scaling, packed, spill=None) -> None:
    """:func:`csr_relu_backward` that overwrites its gradient, as :func:`zvc_relu_backward_` does."""
    _mask_csr("csr_relu_backward_", grad, grad, counts, columns, values, exponents, fmt, scaling, packed, spill)


def _mask_csr(op, grad, grad_x, counts, columns, values, exponents, fmt, scaling, packed, spill) -> None:
    n, dtype = grad.numel(), values.dtype if fmt == "raw" else grad.dtype
    check_values(op, "grad", grad)
    check_csr(op, counts, columns, values, exponents, n, dtype, fmt, scaling, packed, spill)
    launch_warps(
        csr_backward_kernel,
        ceil_div(counts.numel(), CSR_ROWS),
        grad,
        bits_of(grad_x),
        bits_of(grad),
        counts,
        _ends(counts, CSR_COLUMNS, values, packed, spill),
        columns,
        bits_of(values),
        columns if spill is None else spill,
        n,
        _plane(values, fmt, spill),
        _columns_at(counts, values, spill),
        GRAD_WIDE=octets(grad),
        PIECES=CSR_PIECES[fmt],
        SPILL=spill is not None,
        **_constants(grad, n, fmt, packed, columns, values),
    )
