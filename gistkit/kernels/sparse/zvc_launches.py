"""zvc of tensors of one kind (length, dtype, device), again and again: all of the launches but the addresses is ready.
That takes a third of the host's 145 us that :mod:`gistkit.kernels.sparse.operators` takes (H100, 16 MB of fp32). Values
are single items: ``raw``, ``fp16`` or ``fp8``, without scaling."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.formats import ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.launch.tiling import NUM_WARPS, Ready
from gistkit.kernels.layout import BIT_DTYPES, value_dtype
from gistkit.kernels.sparse.compact_kernels import compact_kernel
from gistkit.kernels.sparse.ends import FEW, GROUP, ends_kernel, rounds, sums_kernel
from gistkit.kernels.sparse.operators import PIECES, RUN, UNBOUNDED, ZVC_SLOTS
from gistkit.kernels.sparse.spill import group_slots
from gistkit.kernels.sparse.values import TRITON_DTYPES
from gistkit.kernels.sparse.zvc_kernels import zvc_decode_kernel, zvc_encode_kernel
from gistkit.kernels.warp.lanes import asm_level

Packed = tuple[torch.Tensor, ...]
"""Words int32[32 * slots], counts int16[slots], values[capacity], and no exponents."""


class ZvcLaunches:
    """Encodings, values in ``fmt``, of dense tensors of n elements of a dtype (fp32, bf16 or fp16) on a CUDA device."""

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device, fmt: str) -> None:
        self._n = n
        self._slots = ceil_div(self._n, ZVC_SLOT)
        self._groups = ceil_div(self._slots, GROUP)
        values = value_dtype(fmt, dtype)
        dtypes = (torch.int32, torch.int16, values, torch.int64, torch.int32)
        self._new = [torch.empty(0, dtype=d, device=device).new_empty for d in dtypes]
        self._none = torch.empty(0, dtype=torch.uint8, device=device)
        asm, whole, element = asm_level(self._none), n % 8 == 0, TRITON_DTYPES[dtype]
        bits, items, size = BIT_DTYPES[dtype.itemsize], BIT_DTYPES[values.itemsize], values.itemsize
        u8, i16, i64, index = torch.uint8, torch.int16, torch.int64, self._none.get_device()

        def ready(kernel: Any, *dtypes: torch.dtype, num_warps: int = 1, **constants: Any) -> Ready:
            return Ready(kernel, index, num_warps, dtypes, **constants)

        decoded, payload = bits if fmt == "raw" else dtype, (u8, i16, i64, items, u8)
        form = {"FMT": fmt, "SCALING": "none", "PACKED": True, "DTYPE": element, "WIDE": True, "WHOLE": whole}
        plain, masked = ({**form, "GRAD": grad, "GRAD_WIDE": grad and whole, "ASM": asm} for grad in (False, True))
        self._encode = ready(zvc_encode_kernel, bits, u8, i16, items, FMT=fmt, DTYPE=element, WIDE=whole, ASM=asm)
        self._decode = ready(zvc_decode_kernel, decoded, i16, *payload, **plain)
        self._backward = ready(zvc_decode_kernel, bits, bits, *payload, **masked)
        self._compact = ready(
            compact_kernel, items, items, i16, i64, items, items, items, STRIDE=ZVC_SLOT, SLOTS=ZVC_SLOTS,
            RUN=RUN[size], PIECES=PIECES[size], COLUMNS=False, SPILL=False,
        )  # fmt: skip
        self._sums = ready(sums_kernel, i16, torch.int32, num_warps=NUM_WARPS, GROUP=GROUP)
        before = i16 if self._slots <= FEW else torch.int32
        self._running = {}
        for spill, total in ((False, False), (True, False), (True, True)):
            constants = {"SPILL": group_slots(ZVC_SLOT) if spill else 0, "TOTAL": total, **rounds(self._slots)}
            self._running[spill, total] = ready(
                ends_kernel, i16, before, i64, items, u8, i64, num_warps=NUM_WARPS, **constants
            )

    def encode_within(self, x: torch.Tensor, capacity: int, spill: torch.Tensor, count: torch.Tensor) -> Packed:
        """x packed into ``capacity`` values and the spill (:mod:`gistkit.kernels.sparse.spill`); how many elements are
        stored goes to ``count``, an int64 of pinned memory or the device's."""
        words, counts = self._new[0](self._slots * ZVC_WORDS), self._new[1](self._slots)
        scratch = self._new[2](self._slots * ZVC_SLOT)
        self._encode(self._slots, (self._n,), x, words, counts, scratch)
        values = self._new[2](capacity)
        ends = self._ends(counts, values, spill, count)
        tensors = (scratch, scratch, counts, ends, values, values, scratch)
        self._compact(ceil_div(self._slots, ZVC_SLOTS), (UNBOUNDED, self._slots, 0, 0), *tensors)
        return words, counts, values, self._none

    def decode(self, packed: Packed, spill: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """out, of the tensor's length and dtype, overwritten by it."""
        words, counts, values, _ = packed
        ends = self._ends(counts, values, spill)
        self._decode(self._slots, (self._n, 0), out, counts, words, counts, ends, values, counts)
        return out

    def relu_backward(self, packed: Packed, spill: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
        """ReLU's gradient, in grad's geometry: grad where an element is stored that is not a negative zero, else +0."""
        words, counts, values, _ = packed
        out = torch.empty_like(grad)
        ends = self._ends(counts, values, spill)
        self._backward(self._slots, (self._n, 0), out, grad, words, counts, ends, values, counts)
        return out

    def _ends(
        self, counts: torch.Tensor, values: torch.Tensor, spill: torch.Tensor | None, count: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int64[slots]: where each slot's values end."""
        ends, before = self._new[3](self._slots), counts
        if self._slots > FEW:
            before = self._new[4](self._groups)
            self._sums(self._groups, (self._slots,), counts, before)
        beside = counts if spill is None else spill
        numbers, total = (self._slots, 0 if spill is None else values.numel()), ends if count is None else count
        running = self._running[spill is not None, count is not None]
        running(self._groups, numbers, counts, before, ends, values, beside, total)
        return ends
