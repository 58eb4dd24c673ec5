"""Oracle of gistkit.kernels.sparse.ranges: parts of sparse storage; also what runs on CPU tensors."""

from __future__ import annotations

import torch

from gistkit.formats import CSR_COLUMNS, ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.reference import narrow
from gistkit.kernels.reference.sparse import compact, csr_decode, zvc_decode
from gistkit.kernels.reference.spill import joined
from gistkit.kernels.sparse.range_arguments import check_csr_rows, check_zvc_slots

_NONE = torch.empty(0, dtype=torch.uint8)


def _elements(values, counts, exponents, first, count, dtype, fmt, scaling, packed, stride) -> torch.Tensor:
    """The stored elements of ``count`` groups from ``first`` on, close together, as dtype."""
    part = counts[first : first + count]
    stored = int(part.sum(dtype=torch.int64))
    if not packed:
        items, start = compact(values[first * stride : (first + count) * stride], part, stride, stored), 0
    else:
        start = int(counts[:first].sum(dtype=torch.int64))
        codes = narrow.fp10_unpack(values, 3 * values.numel()) if fmt == "fp10" else values
        items = codes[start : start + stored]
    if fmt == "raw":
        return items
    return narrow.from_codes(items, fmt, dtype, narrow.element_exponents(exponents, start, start + stored, scaling))


def zvc_decode_slots(
    words, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None
) -> torch.Tensor:
    """dtype[n]: the n elements from slot ``first`` on."""
    check_zvc_slots(words, counts, values, exponents, first, n, dtype, fmt, scaling, packed, spill)
    (values,) = joined(spill, counts, ZVC_SLOT, values)
    count = ceil_div(n, ZVC_SLOT)
    elements = _elements(values, counts, exponents, first, count, dtype, fmt, scaling, packed, ZVC_SLOT)
    mine = words[first * ZVC_WORDS : (first + count) * ZVC_WORDS]
    part, whole = counts[first : first + count], count * ZVC_SLOT
    return zvc_decode(mine, part, elements, _NONE, whole, dtype, "raw", "none", True)[:n].clone()


def csr_decode_rows(
    counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill=None
) -> torch.Tensor:
    """dtype[n]: the n elements from row ``first`` on."""
    check_csr_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill)
    values, columns = joined(spill, counts, CSR_COLUMNS, values, columns)
    count = ceil_div(n, CSR_COLUMNS)
    part = counts[first : first + count]
    elements = _elements(values, counts, exponents, first, count, dtype, fmt, scaling, packed, CSR_COLUMNS)
    if packed:
        start = int(counts[:first].sum(dtype=torch.int64))
        mine = columns[start : start + elements.numel()]
    else:
        mine = compact(
            columns[first * CSR_COLUMNS : (first + count) * CSR_COLUMNS], part, CSR_COLUMNS, elements.numel()
        )
    whole = count * CSR_COLUMNS
    return csr_decode(part, mine, elements, _NONE, whole, dtype, "raw", "none", True)[:n].clone()
