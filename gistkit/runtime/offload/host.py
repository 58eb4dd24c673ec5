"""What stands for a tensor, or for what a node keeps, while its bytes are on the host.

vDNN section III-B: a tensor leaves the device after its last use in forward and comes back for backward. The offloader
(:mod:`gistkit.runtime.offload.offloader`) moves the bytes; after the first use they stay on the device until the last
reader lets go of them. On a CPU model "host" is the same memory, of which nothing is gained: under a plan for hardware
with a link it is copied all the same, and ``LiveBytes`` does not see the copy, which stands for memory that is not the
device's.

A sparse payload that came out larger than a budget has room for (:mod:`gistkit.runtime.program.density_excess`) goes
to the host as decoded values, which stay there and are copied for each use anew (:class:`HostValues`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from gistkit.codecs import Encoded, Sparse, aligned, restored
from gistkit.ir import FORMS, STAY
from gistkit.kernels import flat, is_dense
from gistkit.nn.keep import Away, Coded
from gistkit.runtime.offload.parcel import Parcel


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
        return restored(_fetched(self._values, self._device), self.encoded)

    @torch.no_grad()
    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        ordered, ours = aligned(grad, self.encoded)
        made = ordered if ours else ordered.clone()
        for part, blocked in zip(made.split(self._chunk), self._blocked.split(self._chunk), strict=True):
            part.masked_fill_(_fetched(blocked, self._device), 0)
        return restored(made, self.encoded)


class Delegating:
    """A body that hands its uses on to what holds the values now."""

    def here(self) -> Coded:
        """What holds the values."""
        raise NotImplementedError

    def dense(self) -> torch.Tensor:
        return self.here().dense()

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return self.here().relu_backward(grad)


class HostBody(Delegating):
    """A codec's payload, of ``dense`` the tensor itself, on the host until it is prefetched or first used.

    ``moved``: asked once, before the payload comes back; what it gives stands in for the payload from then on, None
    leaves it as it is. While the number of stored elements is not known a prefetch with such a question is put off.
    """

    def __init__(self, parcel: Parcel, moved: Callable[[Parcel], HostValues | None] | None = None) -> None:
        self.parcel, self._moved = parcel, moved
        self._values: HostValues | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return self.parcel.device_bytes

    @property
    def density(self) -> float | None:
        stored, n = self.parcel.stored(), self.parcel.form.numel
        return None if stored is None or not n else stored / n

    @property
    def fresh(self) -> bool:
        """Whether :meth:`dense` gives memory of its own, which its caller may overwrite."""
        return FORMS[self.parcel.form.codec].returns != STAY

    def release(self) -> None:
        self.parcel.release()

    def prefetch(self) -> None:
        if self._moved is None or self.parcel.stored() is not None:
            if self._settled() is None:
                self.parcel.prefetch()

    def _settled(self) -> HostValues | None:
        with self._lock:
            if self._moved is not None:
                self._values, self._moved = self._moved(self.parcel), None
            return self._values

    def here(self) -> Coded:
        return self._settled() or Coded(self.parcel.get())


class AwayOnHost(Away):
    """What an op keeps for itself (a mask, a pool's map) on the host until its backward runs; ``put`` sends a tensor or
    an encoding."""

    def __init__(self, kept: Any, put: Callable[[torch.Tensor | Encoded], Parcel]) -> None:
        def sent(leaf: Any) -> Any:
            if isinstance(leaf, Coded):
                return put(leaf.encoded)
            return put(leaf) if isinstance(leaf, torch.Tensor) else leaf

        self._kept = tree_map(sent, kept)

    def back(self) -> Any:
        """The hold with its tensors on the device."""
        return tree_map(_back, self._kept)


def _back(leaf: Any) -> Any:
    got = leaf.get() if isinstance(leaf, Parcel) else leaf
    return Coded(got) if isinstance(got, Encoded) else got


def arrived(t: torch.Tensor) -> torch.Tensor:
    """A copy of t in host memory, of the same size and strides, for the host to read. Waits for the device."""
    with _disable_current_modes(), torch.no_grad():
        there = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu", pin_memory=t.is_cuda)
        there.copy_(t, non_blocking=is_dense(t))
    if t.is_cuda:
        torch.cuda.current_stream(t.device).synchronize()
    return there


def _fetched(there: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor in the device's memory, on CUDA one of the current stream's."""
    with torch.no_grad():
        here = torch.empty_strided(there.size(), there.stride(), dtype=there.dtype, device=device)
        return here.copy_(there, non_blocking=True)
