"""zvc of tensors of one kind (length, dtype, device), again and again: all of the launches but the addresses is ready.
That takes a third of the host's 145 us that :mod:`gistkit.kernels.sparse.operators` takes (H100, 16 MB of fp32). Values
are single items: ``raw``, ``fp16`` or ``fp8``, without scaling."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.formats import ZVC_SLOT, ZVC_WORDS, ceil_div
from gistkit.kernels.launch.tiling import Ready
from gistkit.kernels.layout import BIT_DTYPES, value_dtype
from gistkit.kernels.sparse.compact_kernels import compact_kernel
from gistkit.kernels.sparse.ends import COUNTS_A_ROUND, FEW, GROUP, SUMS_A_ROUND, ends_kernel, sums_kernel
from gistkit.kernels.sparse.operators import PIECES, RUN, UNBOUNDED, ZVC_SLOTS
from gistkit.kernels.sparse.spill import group_slots
from gistkit.kernels.sparse.values import TRITON_DTYPES
from gistkit.kernels.sparse.zvc_kernels import zvc_backward_kernel, zvc_decode_kernel, zvc_encode_kernel
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

        def ready(kernel: Any, dtypes: tuple[torch.dtype, ...], **constants: Any) -> _Launch:
            return _Launch(Ready(kernel, index, 1, **constants), dtypes)

        form = {"FMT": fmt, "PACKED": True, "WIDE": True, "WHOLE": whole, "ASM": asm}
        decoded = bits if fmt == "raw" else dtype
        self._encode = ready(zvc_encode_kernel, (bits, u8, i16, items), FMT=fmt, DTYPE=element, WIDE=whole, ASM=asm)
        self._decode = ready(
            zvc_decode_kernel, (decoded, u8, i16, i64, items, u8), SCALING="none", DTYPE=element, **form
        )
        self._backward = ready(zvc_backward_kernel, (bits, bits, u8, i16, i64, items), GRAD_WIDE=whole, **form)
        self._compact = ready(
            compact_kernel, (items, items, i16, i64, items, items, items), STRIDE=ZVC_SLOT, SLOTS=ZVC_SLOTS,
            RUN=RUN[size], PIECES=PIECES[size], COLUMNS=False, SPILL=False,
        )  # fmt: skip
        few = self._slots <= FEW
        constants: dict[str, Any] = {"GROUP": GROUP}
        constants |= {"EACH": GROUP, "ROUND": COUNTS_A_ROUND} if few else {"EACH": 1, "ROUND": SUMS_A_ROUND}
        self._sums = _Launch(Ready(sums_kernel, index, GROUP=GROUP), (i16, torch.int32))
        self._running = {
            (spill, total): _Launch(
                Ready(ends_kernel, index, SPILL=group_slots(ZVC_SLOT) if spill else 0, TOTAL=total, **constants),
                (i16, i16 if few else torch.int32, i64, items, u8, i64),
            )
            for spill, total in ((False, False), (True, False), (True, True))
        }

    def encode_within(self, x: torch.Tensor, capacity: int, spill: torch.Tensor, count: torch.Tensor) -> Packed:
        """x packed into ``capacity`` values and the spill (:mod:`gistkit.kernels.sparse.spill`); how many elements are
        stored goes to ``count``, an int64 of pinned memory or the device's."""
        words, counts = self._new[0](self._slots * ZVC_WORDS), self._new[1](self._slots)
        scratch = self._new[2](self._slots * ZVC_SLOT)
        self._encode(self._slots, (x, words, counts, scratch), (self._n,))
        values = self._new[2](capacity)
        ends = self._ends(counts, values, spill, count)
        tensors = (scratch, scratch, counts, ends, values, values, scratch)
        self._compact(ceil_div(self._slots, ZVC_SLOTS), tensors, (UNBOUNDED, self._slots, 0, 0))
        return words, counts, values, self._none

    def decode(self, packed: Packed, spill: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """out, of the tensor's length and dtype, overwritten by it."""
        words, counts, values, _ = packed
        tensors = (out, words, counts, self._ends(counts, values, spill), values, counts)
        self._decode(self._slots, tensors, (self._n, 0))
        return out

    def relu_backward(self, packed: Packed, spill: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
        """ReLU's gradient, in grad's geometry: grad where an element is stored that is not a negative zero, else +0."""
        words, counts, values, _ = packed
        out = torch.empty_like(grad)
        tensors = (out, grad, words, counts, self._ends(counts, values, spill), values)
        self._backward(self._slots, tensors, (self._n, 0))
        return out

    def _ends(
        self, counts: torch.Tensor, values: torch.Tensor, spill: torch.Tensor | None, count: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int64[slots]: where each slot's values end."""
        ends, before = self._new[3](self._slots), counts
        if self._slots > FEW:
            before = self._new[4](self._groups)
            self._sums(self._groups, (counts, before), (self._slots,))
        beside = counts if spill is None else spill
        tensors = (counts, before, ends, values, beside, ends if count is None else count)
        numbers = (self._slots, 0 if spill is None else values.numel())
        self._running[spill is not None, count is not None](self._groups, tensors, numbers)
        return ends


class _Launch:
    """A launch, and as what dtypes its kernel sees its tensors."""

    __slots__ = ("_dtypes", "_ready")

    def __init__(self, ready: Ready, dtypes: tuple[torch.dtype, ...]) -> None:
        self._ready, self._dtypes = ready, dtypes

    def __call__(self, programs: int, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> None:
        if not self._ready.at(programs, [t.data_ptr() for t in tensors], numbers):
            seen = [t.view(dtype) for t, dtype in zip(tensors, self._dtypes, strict=True)]
            self._ready.first(programs, seen, numbers)
