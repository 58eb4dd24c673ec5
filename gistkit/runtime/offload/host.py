"""What stands for a tensor, or for what a node keeps, while its bytes are on the host.

vDNN section III-B: a tensor leaves the device after its last use in forward and comes back for backward. The offloader
(:mod:`gistkit.runtime.offload.offloader`) moves the bytes; after the first use they stay on the device until the last
reader lets go of them. On a CPU model "host" is the same memory, of which nothing is gained: under a plan for hardware
with a link it is copied all the same, and ``LiveBytes`` does not see the copy, which stands for memory that is not the
device's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gistkit.codecs import Encoded
from gistkit.ir import FORMS, STAY
from gistkit.nn.keep import Away, Coded
from gistkit.runtime.offload.parcel import Parcel


class HostBody(Coded):
    """A codec's payload, of ``dense`` the tensor itself, on the host until it is prefetched or first used."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel

    @property
    def encoded(self) -> Encoded:  # type: ignore[override]
        return self.parcel.get()

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


class AwayOnHost(Away):
    """What an op keeps for itself (a mask, a pool's map) on the host until its backward runs; ``put`` sends it."""

    def __init__(self, kept: Any, put: Callable[[torch.Tensor | Encoded], Parcel]) -> None:
        def sent(leaf: Any) -> Any:
            if isinstance(leaf, Coded):
                return put(leaf.encoded)
            return put(leaf) if isinstance(leaf, torch.Tensor) else leaf

        self._kept = tree_map(sent, kept)

    def back(self) -> Any:
        return tree_map(_back, self._kept)


def _back(leaf: Any) -> Any:
    got = leaf.get() if isinstance(leaf, Parcel) else leaf
    return Coded(got) if isinstance(got, Encoded) else got
