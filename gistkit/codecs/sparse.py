"""Sparse storage: only the elements whose bit pattern is not zero (Gist section IV-A, SSDC;
cDMA's zero-value compression).

A CPU tensor is packed at once. On CUDA the kernels write into a scratch of worst-case size, one slot of it for every
1024 (zvc) or 256 (csr) elements, and how many elements are stored in all, only the device knows: the scratch is the
payload (``Encoded.pending``), the host goes on, and the runtime's packer calls :meth:`Sparse.settle` once the number
has arrived. Decoding gives the same bits before and after.

Value formats: ``raw`` keeps the bits. An unscaled narrow format is written by the kernel itself, fp10 one code per
int16 until it is packed. A scaled one has its blocks counted over the *packed* values, so the scratch stays raw.
Payload: (index, counts, values, exponents); the index is zvc's mask words or csr's columns.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from gistkit import formats
from gistkit.codecs.base import Codec, Encoded, aligned, dense_layout, restored
from gistkit.codecs.bounds import ErrorBound
from gistkit.codecs.narrow import DECODERS, ENCODERS
from gistkit.errors import GistError
from gistkit.kernels import ops
from gistkit.kernels.layout import flat
from gistkit.kernels.sparse_args import value_dtype

Payload = tuple[torch.Tensor, ...]


class Sparse(Codec):
    """Common half of zvc and csr. ``slot`` is the number of elements that share a count."""

    slot: int

    def __init__(self, name: str, fmt: formats.FloatFormat | None = None, scaling: str = "none") -> None:
        super().__init__(name)
        self.fmt, self.scaling = fmt, scaling
        self.value_format = "raw" if fmt is None else fmt.name
        self._scratch_format = self.value_format if scaling == "none" else "raw"
        if fmt is not None:
            self.lossless = False
            self.error_bound = ErrorBound(fmt, scaling, packed=scaling != "none")

    def begin(self, x: torch.Tensor) -> Encoded:
        """The encoding of x with the scratch as its payload, ``pending`` (exact at once where x is empty)."""
        return self._begun(self._checked(x))

    def total(self, encoded: Encoded) -> torch.Tensor:
        """0-d int64 tensor on the payload's device: how many elements are stored. Does not synchronise."""
        return encoded.payload[1].sum(dtype=torch.int64)

    def settle(self, encoded: Encoded, total: int) -> None:
        """Replace the scratch by arrays of exactly ``total`` values, on the current stream, without synchronising.
        Raises GistError for a total that cannot be; does nothing where the payload is exact already."""
        payload, pending = encoded.state()
        if not pending:
            return
        if not 0 <= total <= encoded.numel:
            raise GistError(
                f"codec {self.name}: got {total} stored elements of {encoded.numel}; the count was overwritten on its "
                "way to the host, which is a defect of the transport"
            )
        encoded.settle(self._packed(payload, total), nonzeros=total)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        payload, pending = encoded.state()
        n, dtype = encoded.numel, encoded.dtype
        if not pending:
            values = self._decode(payload, n, dtype, self.value_format, self.scaling, True)
        elif self.scaling == "none":
            values = self._decode(payload, n, dtype, self._scratch_format, "none", False)
        else:
            values = self._decode(self._rounded(payload, n, dtype), n, dtype, "raw", "none", True)
        return restored(values, encoded)

    def decode_range(self, encoded: Encoded, start: int, stop: int) -> torch.Tensor:
        payload, pending = encoded.state()
        if start >= stop or (pending and self.scaling != "none"):
            return super().decode_range(encoded, start, stop)
        fmt = self._scratch_format if pending else self.value_format
        first = start // self.slot
        n = min(formats.ceil_div(stop, self.slot) * self.slot, encoded.numel) - first * self.slot
        values = self._decode_groups(payload, first, n, encoded.dtype, fmt, not pending)
        return values[start - first * self.slot : stop - first * self.slot]

    def relu_backward(self, encoded: Encoded, grad: torch.Tensor) -> torch.Tensor:
        payload, pending = encoded.state()
        flat_grad = aligned(grad, encoded)
        if pending:
            return restored(self._relu_backward(flat_grad, payload, self._scratch_format, "none", False), encoded)
        return restored(self._relu_backward(flat_grad, payload, self.value_format, self.scaling, True), encoded)

    def predicted_bytes(self, n: int, dtype: torch.dtype, density: float | None = None) -> int:
        stored = n if density is None else round(density * n)
        values = stored * dtype.itemsize if self.fmt is None else formats.narrow_bytes(self.fmt, self.scaling, stored)
        return self._meta_bytes(n, stored) + values

    def scratch_bytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of :meth:`begin`'s payload for n elements of ``dtype``: whole slots, values in the scratch's format."""
        stored = formats.ceil_div(n, self.slot) * self.slot
        return self._meta_bytes(n, stored) + stored * value_dtype(self._scratch_format, dtype).itemsize

    def packing_bytes(self, stored: int, dtype: torch.dtype) -> int:
        """What :meth:`settle` takes beside scratch and result: the packed values before they get their own format."""
        if self._narrows_while_packing or (self.scaling == "none" and self.value_format != "fp10"):
            return 0
        return stored * value_dtype(self._scratch_format, dtype).itemsize

    def _encode(self, x: torch.Tensor) -> Encoded:
        if x.device.type != "cpu":
            return self._begun(x)
        x = dense_layout(x)
        index, counts, values = self._pack(flat(x), self._scratch_format)
        payload = self._narrowed((index, counts, values, _no_exponents(values)))
        return Encoded(self.name, payload, x, nonzeros=values.numel())

    def _begun(self, x: torch.Tensor) -> Encoded:
        x = dense_layout(x)
        index, counts, values = self._scratch(flat(x), self._scratch_format)
        payload = (index, counts, values, _no_exponents(values))
        if x.numel() == 0:
            return Encoded(self.name, self._packed(payload, 0), x, nonzeros=0)
        return Encoded(self.name, payload, x, pending=True)

    @property
    def _narrows_while_packing(self) -> bool:
        """Whether a scratch becomes packed codes in one pass: blocks of codes of whole bytes."""
        return self.scaling == "block" and self.value_format != "fp10"

    def _packed(self, payload: Payload, total: int) -> Payload:
        index, counts, scratch, exponents = payload
        if self._narrows_while_packing:
            index, values, exponents = self._compacted_blocks(index, counts, scratch, total)
            return index, counts, values, exponents
        index, values = self._compacted(index, counts, scratch, total)
        return self._narrowed((index, counts, values, exponents))

    def _narrowed(self, payload: Payload) -> Payload:
        """The payload with packed values of the scratch's format in the codec's own."""
        index, counts, values, exponents = payload
        if self.fmt is not None and self.scaling != "none":
            values, exponents = ENCODERS[self.fmt.name](values, self.scaling)
        elif self.value_format == "fp10":
            values = ops.fp10_pack(values)
        return index, counts, values, exponents

    def _rounded(self, payload: Payload, n: int, dtype: torch.dtype) -> Payload:
        """A raw scratch as packed raw values that went through the scaled format, without knowing their number: n
        values, zeros after the stored ones. Zeros change no block's exponent, so the result is that of the settled
        payload."""
        assert self.fmt is not None
        index, counts, scratch, exponents = payload
        index, values = self._compacted(index, counts, scratch, n)
        values.masked_fill_(torch.arange(n, device=values.device) >= counts.sum(dtype=torch.int64), 0)
        codes, scales = ENCODERS[self.fmt.name](values, self.scaling)
        values = DECODERS[self.fmt.name](codes, scales, n, dtype, self.scaling)
        return index, counts, values, exponents

    @abstractmethod
    def _pack(self, x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(index, counts, values) of a flat CPU tensor, exact at once."""

    @abstractmethod
    def _scratch(self, x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(index, counts, values) of a flat tensor, one slot of values a count."""

    @abstractmethod
    def _compacted(
        self, index: torch.Tensor, counts: torch.Tensor, scratch: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(index, values) of a scratch, close together; total may be more than there is."""

    @abstractmethod
    def _compacted_blocks(
        self, index: torch.Tensor, counts: torch.Tensor, scratch: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(index, codes, exponents) of a raw scratch, close together, scaled per block; total is the sum of counts."""

    @abstractmethod
    def _decode(
        self, payload: Payload, n: int, dtype: torch.dtype, fmt: str, scaling: str, packed: bool
    ) -> torch.Tensor: ...

    @abstractmethod
    def _decode_groups(
        self, payload: Payload, first: int, n: int, dtype: torch.dtype, fmt: str, packed: bool
    ) -> torch.Tensor:
        """n elements from slot ``first`` on."""

    @abstractmethod
    def _relu_backward(
        self, grad: torch.Tensor, payload: Payload, fmt: str, scaling: str, packed: bool
    ) -> torch.Tensor: ...

    @abstractmethod
    def _meta_bytes(self, n: int, stored: int) -> int: ...


def _no_exponents(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty((0,), dtype=torch.uint8)


class Zvc(Sparse):
    """A bitmap and the values; smaller than csr where more than an eighth of the elements is stored."""

    slot = formats.ZVC_SLOT

    def _pack(self, x, fmt):
        return ops.zvc_pack(x, fmt)

    def _scratch(self, x, fmt):
        return ops.zvc_encode(x, fmt)

    def _compacted(self, index, counts, scratch, total):
        return index, ops.compact(scratch, counts, self.slot, total)

    def _compacted_blocks(self, index, counts, scratch, total):
        return index, *ops.compact_blocks(scratch, counts, self.slot, total, self.value_format)

    def _decode(self, payload, n, dtype, fmt, scaling, packed):
        return ops.zvc_decode(*payload, n, dtype, fmt, scaling, packed)

    def _decode_groups(self, payload, first, n, dtype, fmt, packed):
        return ops.zvc_decode_slots(*payload, first, n, dtype, fmt, self.scaling if packed else "none", packed)

    def _relu_backward(self, grad, payload, fmt, scaling, packed):
        return ops.zvc_relu_backward(grad, *payload, fmt, scaling, packed)

    def _meta_bytes(self, n, stored):
        return formats.zvc_meta_bytes(n)


class Csr(Sparse):
    """Rows of 256 elements: a count a row, a one-byte column index and a value per stored element."""

    slot = formats.CSR_COLUMNS

    def _pack(self, x, fmt):
        counts, columns, values = ops.csr_pack(x, fmt)
        return columns, counts, values

    def _scratch(self, x, fmt):
        counts, columns, values = ops.csr_encode(x, fmt)
        return columns, counts, values

    def _compacted(self, index, counts, scratch, total):
        return ops.csr_compact(index, scratch, counts, total)

    def _compacted_blocks(self, index, counts, scratch, total):
        return ops.csr_compact_blocks(index, scratch, counts, total, self.value_format)

    def _decode(self, payload, n, dtype, fmt, scaling, packed):
        columns, counts, values, exponents = payload
        return ops.csr_decode(counts, columns, values, exponents, n, dtype, fmt, scaling, packed)

    def _decode_groups(self, payload, first, n, dtype, fmt, packed):
        columns, counts, values, exponents = payload
        scaling = self.scaling if packed else "none"
        return ops.csr_decode_rows(counts, columns, values, exponents, first, n, dtype, fmt, scaling, packed)

    def _relu_backward(self, grad, payload, fmt, scaling, packed):
        columns, counts, values, exponents = payload
        return ops.csr_relu_backward(grad, counts, columns, values, exponents, fmt, scaling, packed)

    def _meta_bytes(self, n, stored):
        return formats.csr_meta_bytes(n, stored)
