"""The two layouts of sparse storage. ``zvc`` says by a bitmap where the stored elements were, ``csr`` by a column byte
each."""

from __future__ import annotations

from gistkit import formats
from gistkit.codecs.sparse import Sparse
from gistkit.kernels import ops
from gistkit.kernels.launch import direct


class Zvc(Sparse):
    """A bitmap and the values; smaller than csr where more than an eighth of the elements is stored."""

    slot = formats.ZVC_SLOT
    _columns = False

    def _pack(self, x, fmt):
        return ops.zvc_pack(x, fmt)

    def _scratch(self, x, fmt):
        return direct.zvc_encode(x, fmt)

    def _compacted(self, index, counts, scratch, total, spill=None):
        return index, direct.compact(scratch, counts, self.slot, total, spill)

    def _compacted_blocks(self, index, counts, scratch, total):
        return index, *ops.compact_blocks(scratch, counts, self.slot, total, self.value_format)

    def _decode(self, payload, n, dtype, fmt, scaling, packed, spill=None):
        return direct.zvc_decode(*payload, n, dtype, fmt, scaling, packed, spill)

    def _decode_groups(self, payload, first, n, dtype, fmt, packed, spill):
        return ops.zvc_decode_slots(*payload, first, n, dtype, fmt, self.scaling if packed else "none", packed, spill)

    def _relu_backward(self, grad, inplace, payload, fmt, scaling, packed, spill):
        run = ops.zvc_relu_backward_ if inplace else ops.zvc_relu_backward
        return run(grad, *payload, fmt, scaling, packed, spill)

    def _meta_bytes(self, n, stored):
        return formats.zvc_meta_bytes(n)


class Csr(Sparse):
    """Rows of 256 elements: a count a row, a one-byte column index and a value per stored element."""

    slot = formats.CSR_COLUMNS
    _columns = True

    def _pack(self, x, fmt):
        counts, columns, values = ops.csr_pack(x, fmt)
        return columns, counts, values

    def _scratch(self, x, fmt):
        counts, columns, values = ops.csr_encode(x, fmt)
        return columns, counts, values

    def _compacted(self, index, counts, scratch, total, spill=None):
        return ops.csr_compact(index, scratch, counts, total, spill)

    def _compacted_blocks(self, index, counts, scratch, total):
        return ops.csr_compact_blocks(index, scratch, counts, total, self.value_format)

    def _decode(self, payload, n, dtype, fmt, scaling, packed, spill=None):
        columns, counts, values, exponents = payload
        return ops.csr_decode(counts, columns, values, exponents, n, dtype, fmt, scaling, packed, spill)

    def _decode_groups(self, payload, first, n, dtype, fmt, packed, spill):
        columns, counts, values, exponents = payload
        scaling = self.scaling if packed else "none"
        return ops.csr_decode_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed, spill)

    def _relu_backward(self, grad, inplace, payload, fmt, scaling, packed, spill):
        columns, counts, values, exponents = payload
        run = ops.csr_relu_backward_ if inplace else ops.csr_relu_backward
        return run(grad, counts, columns, values, exponents, fmt, scaling, packed, spill)

    def _meta_bytes(self, n, stored):
        return formats.csr_meta_bytes(n, stored)
