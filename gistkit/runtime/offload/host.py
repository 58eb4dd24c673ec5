"""Payloads that spend the time between their two uses in host memory.

vDNN section III-B: a tensor leaves the device after its last use in forward and comes back for backward. Here both
copies take their turn on the computation's own stream: out when the tensor is saved, back at the first use, so it is on
the device no longer than a plan says; the plan's points of release and prefetch only matter to a copy that runs beside
the computation. The host waits for neither. After its first use the payload stays on the device until the last reader
lets go of it.

A sparse payload that came out larger than a budget has room for (:mod:`gistkit.runtime.program.density_excess`) goes
to the host unpacked, and comes back in parts, for each use anew (:class:`PartedBody`).

Host memory is pinned for a CUDA device. On a CPU model "host" is the same memory, of which nothing is gained: under a
plan for hardware with a link it is copied all the same, and ``LiveBytes`` does not see the copy: it stands for memory
that is not the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from gistkit.codecs import Encoded, Sparse, aligned, restored
from gistkit.errors import GistError
from gistkit.formats import ceil_div
from gistkit.ir import FORMS, STAY
from gistkit.kernels import is_dense
from gistkit.nn.keep import Away, Coded, rows_from


def sent(t: torch.Tensor) -> torch.Tensor:
    """A copy of t in host memory, of the same size and strides. On CUDA it is a copy of the current stream's, and
    nobody but that may read it before; of a t with gaps it is waited for."""
    with _disable_current_modes(), torch.no_grad():
        there = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)
        return there.copy_(t, non_blocking=is_dense(t))


def arrived(t: torch.Tensor) -> torch.Tensor:
    """As :func:`sent`, for the host to read. Waits for the device."""
    there = sent(t)
    if t.is_cuda:
        torch.cuda.current_stream(t.device).synchronize()
    return there


def fetched(there: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor in the device's memory, on CUDA one of the current stream's."""
    with torch.no_grad():
        here = torch.empty_strided(there.size(), there.stride(), dtype=there.dtype, device=device)
        return here.copy_(there, non_blocking=True)


def sent_encoding(encoded: Encoded) -> Encoded:
    """The same encoding in host memory, as it is now. Waits for the device."""
    return encoded.over(tuple(arrived(t) for t in encoded.payload))


class Parcel:
    """Tensors on the host; all come back at the first ask and stay on the device from then on.

    On CUDA both ways are copies of the stream that is current then, which the host does not wait for: the device's
    memory goes back in stream order, and PyTorch gives pinned memory away again only when the copies from and to it are
    done. One that comes back on another stream waits there for the way out.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._device = tensors[0].device
        self._there: tuple[torch.Tensor, ...] = tuple(sent(t.detach()) for t in tensors)
        self._here: tuple[torch.Tensor, ...] = ()
        self._gone: Any = None
        if self._device.type == "cuda":
            self._gone = torch.cuda.current_stream(self._device).record_event()

    @property
    def nbytes(self) -> int:
        """Bytes on the device now."""
        return sum(t.untyped_storage().nbytes() for t in self._here)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host now."""
        return sum(t.untyped_storage().nbytes() for t in self._there)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the device; the host's are let go of."""
        if self._there:
            if self._gone is not None:
                torch.cuda.current_stream(self._device).wait_event(self._gone)
            self._here = tuple(fetched(t, self._device) for t in self._there)
            self._there, self._gone = (), None
        return self._here


class HostBody:
    """A codec's payload, of ``dense`` the tensor itself, on the host until its first use."""

    def __init__(self, encoded: Encoded) -> None:
        self._form = encoded.over(())
        self._parcel = Parcel(encoded.payload)

    @property
    def nbytes(self) -> int:
        return self._parcel.nbytes

    @property
    def fresh(self) -> bool:
        """Whether :meth:`dense` gives memory of its own, which its caller may overwrite."""
        return FORMS[self._form.codec].returns != STAY

    def _coded(self) -> Coded:
        payload = self._parcel.tensors()
        extra = None if self.fresh else (payload[0]._version,)
        return Coded(self._form.over(payload, extra))

    def dense(self) -> torch.Tensor:
        return self._coded().dense()

    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        return self._coded().dense_range(start, stop)

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return self._coded().relu_backward(grad)


class PartedBody:
    """A sparse encoding on the host (``there``, pending), as the scratch of worst-case size that the device makes of
    it: nothing has to be packed beside it. Every use brings slots back to ``device``, one part after the other.

    Beside what it makes, a use takes ``use_bytes`` of the device: a quarter of ``within_bytes`` where a slot fits in
    there, else at most all of them; where no slot does, the host decodes and nothing is taken. Synchronises. Raises
    GistError for an encoding that is packed, or has a spill: its slots do not lie where they would be cut.
    """

    nbytes = 0

    def __init__(self, codec: Sparse, there: Encoded, device: torch.device, within_bytes: int) -> None:
        _, pending, spill = there.state()
        if not pending or spill is not None:
            raise GistError(
                f"PartedBody: the encoding must be a scratch, whose slots can be cut, got {there!r}"
                f"{' with a spill' if spill is not None else ''}; send what Sparse.begin has made"
            )
        self._codec, self._device, self._there = codec, device, there
        self._slots = ceil_div(there.numel, codec.slot)
        slot_bytes = self._slot_bytes()
        slots = max(within_bytes // 4 // slot_bytes, min(1, within_bytes // slot_bytes))
        self._on_host = slots == 0
        self._step = min(self._slots, slots) or 1
        self.use_bytes = min(self._slots, slots) * slot_bytes

    def _slot_bytes(self) -> int:
        """Bytes of one slot's payload and of what decoding makes of it."""
        item = self._there.dtype.itemsize
        stored = sum(t.numel() * t.element_size() for t in self._there.payload) // self._slots
        # a scaled format is rounded on the way (Sparse._rounded): packed values, places, codes, scales
        decoded = item if self._codec.scaling == "none" else 3 * item + 14
        return stored + self._codec.slot * decoded

    @property
    def host_bytes(self) -> int:
        """Bytes on the host."""
        return sum(t.untyped_storage().nbytes() for t in self._there.payload)

    @torch.no_grad()
    def dense(self) -> torch.Tensor:
        return restored(self.dense_range(0, self._there.numel), self._there)

    @torch.no_grad()
    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        out = torch.empty(stop - start, dtype=self._there.dtype, device=self._device)
        slot = self._codec.slot
        for first in range(start // slot, ceil_div(stop, slot), self._step):
            last = min(first + self._step, ceil_div(stop, slot))
            lo, hi = max(start, first * slot), min(stop, last * slot)
            cut = slice(lo - first * slot, hi - first * slot)
            self._put(out[lo - start : hi - start], lambda at=(first, last), cut=cut: self._decoded(*at)[cut])
        return out

    def dense_rows(self, start: int, stop: int) -> torch.Tensor:
        rows = rows_from(self.dense_range, self._there.shape, self._there.stride, start, stop)
        return self.dense()[start:stop] if rows is None else rows

    @torch.no_grad()
    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        grad, ours = aligned(grad, self._there)
        out = grad if ours else torch.empty_like(grad)
        slot, step = self._codec.slot, self._step
        for first in range(0, self._slots, step):
            part = slice(first * slot, min((first + step) * slot, self._there.numel))
            self._put(out[part], lambda first=first, part=part: self._masked(first, grad[part]))
        return restored(out, self._there)

    def _put(self, out: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        """Copy what ``make`` makes, of which nothing is left when the next part's turn comes."""
        if self._on_host:
            with _disable_current_modes():
                made = make()
            out.copy_(made)
        else:
            out.copy_(make())

    def _decoded(self, first: int, last: int) -> torch.Tensor:
        return self._codec.decode(self._part(first, last))

    def _masked(self, first: int, grad: torch.Tensor) -> torch.Tensor:
        part = self._part(first, min(first + self._step, self._slots))
        return self._codec.relu_backward(part, arrived(grad) if self._on_host else grad)

    def _part(self, first: int, last: int) -> Encoded:
        """Slots first..last, where they are decoded, as an encoding of their own."""
        parts = []
        for t in self._there.payload:
            each = t.numel() // self._slots
            part = t[first * each : last * each]
            parts.append(part if self._on_host else fetched(part, self._device))
        n = min(last * self._codec.slot, self._there.numel) - first * self._codec.slot
        return Encoded(self._codec.name, tuple(parts), torch.empty(n, dtype=self._there.dtype, device="meta"), (), True)


class AwayOnHost(Away):
    """What an op keeps for itself (a mask, a pool's map) on the host until its backward runs."""

    def __init__(self, kept: Any) -> None:
        self._kept = _swapped(kept, torch.Tensor, lambda t: Parcel((t,)))

    def back(self) -> Any:
        """The hold with its tensors on the device."""
        return _swapped(self._kept, Parcel, lambda parcel: parcel.tensors()[0])


def _swapped(kept: Any, kind: type, swap: Callable[[Any], Any]) -> Any:
    """A node's hold with everything of a kind in it replaced."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Coded):
            return Coded(leaf.encoded.over(_swapped(leaf.encoded.payload, kind, swap)))
        return swap(leaf) if isinstance(leaf, kind) else leaf

    return tree_map(of, kept)
