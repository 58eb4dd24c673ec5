"""Payloads that spend the time between their two uses in host memory.

vDNN section III-B: a tensor leaves the device after its last use in forward and comes back for backward. Here both
copies are plain synchronous ones, on the stream of whoever asks: out when the tensor is saved, back at the first use,
so it is on the device no longer than a plan says; the plan's points of release and prefetch only matter to a copy that
runs beside the computation. After its first use the payload stays on the device until the last reader lets go of it.

Host memory is pinned for a CUDA device. On a CPU model "host" is the same memory, of which nothing is gained; it is
copied all the same, and ``LiveBytes`` does not see the copy, which stands for memory that is not the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gistkit.codecs import Encoded
from gistkit.nn.keep import Away, Coded


def sent(t: torch.Tensor) -> torch.Tensor:
    """A copy of t in host memory, of the same size and strides. Waits for the device."""
    with _disable_current_modes(), torch.no_grad():
        there = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)
        return there.copy_(t)


def fetched(there: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor in the device's memory."""
    with torch.no_grad():
        return torch.empty_strided(there.size(), there.stride(), dtype=there.dtype, device=device).copy_(there)


class Parcel:
    """Tensors on the host; all come back at the first ask and stay on the device from then on."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._device = tensors[0].device
        self._there: tuple[torch.Tensor, ...] = tuple(sent(t.detach()) for t in tensors)
        self._here: tuple[torch.Tensor, ...] = ()

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
            self._here = tuple(fetched(t, self._device) for t in self._there)
            self._there = ()
        return self._here


class HostBody:
    """A codec's payload, of ``dense`` the tensor itself, on the host until its first use."""

    def __init__(self, encoded: Encoded) -> None:
        self._form = encoded.over(())
        self._parcel = Parcel(encoded.payload)

    @property
    def nbytes(self) -> int:
        """Bytes on the device now."""
        return self._parcel.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes on the host now."""
        return self._parcel.host_bytes

    @property
    def fresh(self) -> bool:
        """Whether :meth:`dense` gives memory of its own, which its caller may overwrite."""
        return self._form.codec != "dense"

    def _coded(self) -> Coded:
        payload = self._parcel.tensors()
        extra = None if self.fresh else (payload[0]._version,)
        return Coded(self._form.over(payload, extra))

    def dense(self) -> torch.Tensor:
        """The tensor, on the device."""
        return self._coded().dense()

    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop in storage order, on the device."""
        return self._coded().dense_range(start, stop)

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """ReLU's input gradient, the tensor being the ReLU's whole output."""
        return self._coded().relu_backward(grad)


class AwayOnHost(Away):
    """What an op keeps for itself (a mask, a pool's map) on the host until its backward runs."""

    def __init__(self, kept: Any) -> None:
        self._parcels: list[Parcel] = []
        self._kept = _swapped(kept, torch.Tensor, self._send)

    def _send(self, t: torch.Tensor) -> Parcel:
        self._parcels.append(Parcel((t,)))
        return self._parcels[-1]

    @property
    def host_bytes(self) -> int:
        """Bytes on the host now."""
        return sum(p.host_bytes for p in self._parcels)

    def back(self) -> Any:
        """The hold with its tensors on the device."""
        return _swapped(self._kept, Parcel, lambda parcel: parcel.tensors()[0])


def _swapped(kept: Any, kind: type, swap: Callable[[Any], Any]) -> Any:
    """A node's hold with everything of a kind in it replaced."""
    if isinstance(kept, kind):
        return swap(kept)
    if isinstance(kept, Coded):
        payload: Any = kept.encoded.payload
        return Coded(kept.encoded.over(tuple(_swapped(part, kind, swap) for part in payload)))
    if isinstance(kept, tuple) and hasattr(kept, "_fields"):
        return type(kept)(*(_swapped(part, kind, swap) for part in kept))
    if type(kept) in (tuple, list):
        return type(kept)(_swapped(part, kind, swap) for part in kept)
    return kept


__all__ = ["AwayOnHost", "HostBody", "Parcel", "fetched", "sent"]
