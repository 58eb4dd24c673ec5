"""Payloads that spend the time between their two uses in host memory.

vDNN section III-B: a tensor leaves the device after its last use in forward and comes back for backward. Here both
copies take their turn on the computation's own stream: out when the tensor is saved, back at the first use, so it is on
the device no longer than a plan says; the plan's points of release and prefetch only matter to a copy that runs beside
the computation. The host waits for neither. After its first use the payload stays on the device until the last reader
lets go of it.

A sparse payload that came out larger than a budget has room for (:mod:`gistkit.runtime.program.density_excess`) goes
to the host as decoded values, which stay there and are copied for each use anew (:class:`HostValues`).

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
from gistkit.ir import FORMS, STAY
from gistkit.kernels import flat, is_dense
from gistkit.nn.keep import Away, Coded


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

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the device; the host's are let go of."""
        if self._there:
            if self._gone is not None:
                torch.cuda.current_stream(self._device).wait_event(self._gone)
            self._here = tuple(fetched(t, self._device) for t in self._there)
            self._there, self._gone = (), None
        return self._here


class HostBody(Coded):
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

    @property
    def encoded(self) -> Encoded:  # type: ignore[override]
        payload = self._parcel.tensors()
        return self._form.over(payload, None if self.fresh else (payload[0]._version,))


class HostValues(Coded):
    """The decoded values of a sparse encoding in host memory, and where it blocks the gradient of a ReLU.

    There is no other copy: every use fetches what it needs. Beside its result :meth:`relu_backward` takes
    ``chunk_bytes`` of ``device`` at most, the other uses take nothing. ``encoded`` lies on the host.
    """

    nbytes = 0

    def __init__(self, codec: Sparse, encoded: Encoded, device: torch.device, chunk_bytes: int) -> None:
        super().__init__(encoded.over(()))
        self._device, self._chunk = device, chunk_bytes
        values = codec.decode(encoded)
        # not from the values: a small positive one may have been rounded to zero
        blocked = codec.relu_backward(encoded, torch.ones_like(values)) == 0
        pinned = device.type == "cuda"
        self._values, self._blocked = (flat(t.pin_memory() if pinned else t) for t in (values, blocked))

    @torch.no_grad()
    def dense(self) -> torch.Tensor:
        return restored(self.dense_range(0, self.encoded.numel), self.encoded)

    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        return fetched(self._values[start:stop], self._device)

    @torch.no_grad()
    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        ordered, ours = aligned(grad, self.encoded)
        made = ordered if ours else ordered.clone()
        for part, blocked in zip(made.split(self._chunk), self._blocked.split(self._chunk), strict=True):
            part.masked_fill_(fetched(blocked, self._device), 0)
        return restored(made, self.encoded)


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
