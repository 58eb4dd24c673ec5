"""Sparse storage: only the elements whose bit pattern is not zero (Gist section IV-A, SSDC; cDMA).

A CPU tensor is packed at once. On CUDA the scratch is the payload (``Encoded.pending``) until the runtime's packer
calls :meth:`Sparse.settle` with the number of stored elements, or :meth:`Sparse.begin_within` packs at once into arrays
of a given capacity and a *spill* (gistkit.kernels.sparse.spill). Decoding gives the same bits either way.

Value formats: ``raw`` keeps the bits. An unscaled narrow format is written by the kernel itself, fp10 one code per
int16 until it is packed. A scaled one has its blocks counted over the *packed* values, so the scratch stays raw.
Payload: (index, counts, values, exponents); the index is zvc's mask words or csr's columns.
"""

from __future__ import annotations

import math

import torch

from gistkit import formats
from gistkit.codecs.base import Codec, Encoded, aligned, dense_layout, restored
from gistkit.errors import GistError
from gistkit.kernels import STRIDES, flat, ops, spill_bytes, value_dtype
from gistkit.kernels.launch import direct

Payload = tuple[torch.Tensor, ...]


class Sparse(Codec):
    """Sparse storage in one of two layouts. ``slot`` is the number of elements that share a count.

    ``zvc``: slots of 1024 elements, a bitmap and the values; smaller where more than an eighth of the elements is
    stored. ``csr``: rows of 256, a one-byte column index and a value per stored element.
    """

    def __init__(self, name: str, layout: str, fmt: formats.FloatFormat | None = None, scaling: str = "none") -> None:
        super().__init__(name)
        self.slot = STRIDES[layout]
        self._columns = layout == "csr"  # packed indices are as many as the values
        self._pack = getattr(ops, f"{layout}_pack")
        self._scratch, self._decode = direct.sparse(f"{layout}_encode"), direct.sparse(f"{layout}_decode")
        self._relu_backward = direct.sparse(f"{layout}_relu_backward")
        self._compact = direct.sparse("csr_compact" if self._columns else "compact")
        self.fmt, self.scaling = fmt, scaling
        self.value_format = "raw" if fmt is None else fmt.name
        self._scratch_format = self.value_format if scaling == "none" else "raw"
        if fmt is not None:
            self.relative_error = fmt.relative_error

    def begin(self, x: torch.Tensor) -> Encoded:
        """The encoding of x with the scratch as its payload, ``pending`` (exact at once where x is empty)."""
        return self._begun(self._checked(x))

    @property
    def packs_within(self) -> bool:
        """Whether :meth:`begin_within` works: packed values do not depend on how many there are."""
        return self.scaling == "none" and self.value_format != "fp10"

    @property
    def decodes_scratch(self) -> bool:
        """Whether :meth:`decode` takes no more from a scratch than from packed values; else several times the tensor,
        as the blocks of a scaled format are counted over packed values."""
        return self.scaling == "none"

    def capacity(self, n: int, density: float) -> int:
        """Items that packed arrays need for this share of n elements: whole 256ths of the worst case, rounded up, as
        launches of kernels are looked up by such numbers; a multiple of 8."""
        whole = formats.ceil_div(n, self.slot) * self.slot
        step = formats.ceil_div(whole, 8 * 256) * 8
        return min(max(formats.ceil_div(math.ceil(density * n), step), 1) * step, whole) if n else 0

    def spill_bytes(self, n: int, dtype: torch.dtype, capacity: int) -> int:
        """Bytes of spill that :meth:`begin_within` wants for n elements: enough for every case, 0 where all fit."""
        whole = formats.ceil_div(n, self.slot) * self.slot
        return spill_bytes(whole, capacity, value_dtype(self._scratch_format, dtype).itemsize, self._columns)

    def within_bytes(self, n: int, dtype: torch.dtype, capacity: int) -> int:
        """Bytes of :meth:`begin_within`'s payload; the spill comes on top, elsewhere."""
        return self._meta_bytes(n, capacity) + capacity * value_dtype(self._scratch_format, dtype).itemsize

    def begin_within(self, x: torch.Tensor, capacity: int, spill: torch.Tensor, count: torch.Tensor) -> Encoded:
        """The encoding of x packed into arrays of ``capacity`` items, what does not fit into the spill; ``pending``.

        capacity: as :meth:`capacity` rounds it. spill: flat bytes, :meth:`spill_bytes` or more, from a multiple of 512
        on; for a CUDA tensor pinned host memory, or a device's. It belongs to the encoding, which holds this very
        tensor until it is settled and needs none of it, or dies. count: 0-d int64, of x's device or pinned, gets
        :meth:`total`. The scratch is let go of before this returns, in stream order. Raises GistError where
        :attr:`packs_within` is False. Does not synchronise.
        """
        x = dense_layout(self._checked(x))
        if not self.packs_within:
            raise GistError(
                f"codec {self.name}: begin_within packs values whose place says nothing about their number, but "
                f"{self.value_format} with scaling {self.scaling} depends on it; use begin and settle"
            )
        if x.numel() == 0:
            return self._begun(x)
        ready = self._launches(x, x.numel(), x.dtype)
        if ready is not None:
            payload = ready.encode_within(x, capacity, spill, count)
        else:
            index, counts, values = self._scratch(flat(x), self._scratch_format)
            index, values = self._compacted(index, counts, values, capacity, spill)
            payload = (index, counts, values, _no_exponents(values))
            count.copy_(counts.sum(dtype=torch.int64), non_blocking=True)
        return Encoded(self.name, payload, x, pending=True, spill=spill)

    def total(self, encoded: Encoded) -> torch.Tensor:
        """0-d int64 tensor on the payload's device: how many elements are stored. Does not synchronise."""
        return encoded.payload[1].sum(dtype=torch.int64)

    def settle(self, encoded: Encoded, total: int) -> None:
        """Replace the scratch by arrays of exactly ``total`` values, on the current stream, without synchronising;
        of what :meth:`begin_within` packed let go of the spill, unless something lies there.
        Raises GistError for a total that cannot be; does nothing where the payload is exact already."""
        payload, pending, spill = encoded.state()
        if not pending:
            return
        if not 0 <= total <= encoded.numel:
            raise GistError(
                f"codec {self.name}: got {total} stored elements of {encoded.numel}; the count was overwritten on its "
                "way to the host, which is a defect of the transport"
            )
        if spill is None:
            encoded.settle(self._packed(payload, total), nonzeros=total)
        else:
            encoded.settle(payload, nonzeros=total, spill=spill if total > payload[2].numel() else None)

    def decode(self, encoded: Encoded) -> torch.Tensor:
        payload, pending, spill = encoded.state()
        n, dtype = encoded.numel, encoded.dtype
        if not pending or spill is not None:
            ready = self._launches(payload[2], n, dtype)
            if ready is not None:
                made = torch.empty_strided(encoded.shape, encoded.stride, dtype=dtype, device=payload[2].device)
                return ready.decode(payload, spill, made)
            values = self._decode(*payload, n, dtype, self.value_format, self.scaling, True, spill)
        elif self.scaling == "none":
            values = self._decode(*payload, n, dtype, self._scratch_format, "none", False)
        else:
            values = self._decode(*self._rounded(payload, n, dtype), n, dtype, "raw", "none", True)
        return restored(values, encoded)

    def relu_backward(self, encoded: Encoded, grad: torch.Tensor) -> torch.Tensor:
        payload, pending, spill = encoded.state()
        if grad.stride() == encoded.stride and grad.shape == encoded.shape and (not pending or spill is not None):
            ready = self._launches(grad, encoded.numel, encoded.dtype) if grad.dtype is encoded.dtype else None
            if ready is not None:
                return ready.relu_backward(payload, spill, grad)
        ordered, ours = aligned(grad, encoded)
        form: tuple = (self.value_format, self.scaling, True, spill)
        if pending and spill is None:
            form = (self._scratch_format, "none", False, None)
        made = ordered if ours else torch.empty_like(ordered)
        self._relu_backward(ordered, *payload, made, *form)
        return restored(made, encoded)

    def scratch_bytes(self, n: int, dtype: torch.dtype) -> int:
        """Bytes of :meth:`begin`'s payload for n elements of ``dtype``: whole slots, values in the scratch's format."""
        stored = formats.ceil_div(n, self.slot) * self.slot
        return self._meta_bytes(n, stored) + stored * value_dtype(self._scratch_format, dtype).itemsize

    def packing_bytes(self, stored: int, dtype: torch.dtype) -> int:
        """What :meth:`settle` takes beside scratch and result: the packed values before they get their own format."""
        if self.packs_within:
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

    def _packed(self, payload: Payload, total: int) -> Payload:
        index, counts, scratch, exponents = payload
        index, values = self._compacted(index, counts, scratch, total)
        return self._narrowed((index, counts, values, exponents))

    def _narrowed(self, payload: Payload) -> Payload:
        """The payload with packed values of the scratch's format in the codec's own."""
        index, counts, values, exponents = payload
        if self.scaling != "none":
            values, exponents = ops.narrow_encode(values, self.value_format, self.scaling)
        elif self.value_format == "fp10":
            values = ops.fp10_pack(values)
        return index, counts, values, exponents

    def _rounded(self, payload: Payload, n: int, dtype: torch.dtype) -> Payload:
        """A raw scratch as packed raw values that went through the scaled format, without knowing their number: n
        values, zeros after the stored ones. Zeros change no block's exponent: the result is the settled one's."""
        index, counts, scratch, exponents = payload
        index, values = self._compacted(index, counts, scratch, n)
        values.masked_fill_(torch.arange(n, device=values.device) >= counts.sum(dtype=torch.int64), 0)
        codes, scales = ops.narrow_encode(values, self.value_format, self.scaling)
        values = ops.narrow_decode(codes, scales, n, dtype, self.value_format, self.scaling)
        return index, counts, values, exponents

    def _launches(self, payload: torch.Tensor, n: int, dtype: torch.dtype) -> direct.ZvcLaunches | None:
        """Ready launches for tensors of n elements that lie where the payload does; None where this form has none."""
        if self._columns or not n or not self.packs_within:
            return None
        return direct.zvc_launches(payload, n, dtype, self._scratch_format)

    def _compacted(self, index, counts, scratch, total: int, spill: torch.Tensor | None = None) -> tuple:
        """(index, values) of a scratch, close together; total may be more than there is, and with a spill less."""
        if self._columns:
            return self._compact(index, scratch, counts, total, spill)
        return index, self._compact(scratch, counts, self.slot, total, spill)

    def _meta_bytes(self, n: int, stored: int) -> int:
        return formats.csr_meta_bytes(n, stored) if self._columns else formats.zvc_meta_bytes(n)


def _no_exponents(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty((0,), dtype=torch.uint8)
