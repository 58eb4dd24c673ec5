"""The record of one forward as it runs: calls, saved tensors, backward nodes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from gistkit.capture.ledger import Ledger, StorageEntry
from gistkit.ir import Save


class Packed:
    """What the recorder's hook keeps of a saved tensor: itself, its version and value, its node's sequence number.

    :meth:`lighten` lets go of the tensor: from then on unwritten memory of its geometry stands in for it, made anew at
    each look. That is for fake tensors, where it shows how long a storage lives that nothing keeps for backward.
    """

    __slots__ = ("__weakref__", "_like", "_tensor", "node", "storage", "value", "version")

    def __init__(self, tensor: torch.Tensor, node: int, storage: int | None) -> None:
        self._tensor: torch.Tensor | None = tensor.detach()
        self._like: tuple | None = None
        self.version = tensor._version
        self.node = node
        self.storage = storage
        self.value = -1

    @property
    def tensor(self) -> torch.Tensor:
        """The saved tensor, or what stands in for it."""
        if self._tensor is not None:
            return self._tensor
        assert self._like is not None
        size, stride, dtype, device = self._like
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    @property
    def geometry(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype, without a stand-in."""
        if self._tensor is not None:
            return tuple(self._tensor.shape), self._tensor.dtype
        assert self._like is not None
        return tuple(self._like[0]), self._like[2]

    def lighten(self) -> None:
        """Let go of the tensor."""
        if self._tensor is not None:
            t, self._tensor = self._tensor, None
            self._like = (t.size(), t.stride(), t.dtype, t.device)

    def checked(self) -> torch.Tensor:
        """The tensor; PyTorch's own error if it was written to in between."""
        tensor = self.tensor
        if self._tensor is not None and tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected "
                f"version {self.version} instead."
            )
        return tensor


@dataclass(frozen=True)
class Hold:
    """One saved tensor after the forward: the call that saved it, the sequence number of the node that holds it."""

    call: int
    node: int
    save: Save


@dataclass
class OpenCall:
    """One call of the running forward.

    ``number`` counts calls as they come; a hidden function's is ``("node", sequence number)``. ``lo`` <= x < ``hi`` are
    the sequence numbers of its autograd nodes. ``versions`` holds its operands until it returns.
    """

    number: int | tuple[str, int]
    op: str
    module: str
    lo: int
    hi: int = 0
    covered: int = -1
    split: bool = False
    """Whether gistkit's own takes the backward of such a call in two halves."""
    options: dict | None = None
    operands: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    inplace: bool = False
    versions: list[tuple[torch.Tensor, StorageEntry, int]] = field(default_factory=list)
    packs: list[weakref.ref[Packed]] = field(default_factory=list)
    packed: list[tuple[int | None, str, tuple[int, ...]]] = field(default_factory=list)
    """Storage, dtype and shape of each of its packs, which do not live as long."""

    def add_read(self, storage: int) -> None:
        if storage not in self.reads:
            self.reads.append(storage)

    def add_write(self, storage: int) -> None:
        if storage not in self.writes:
            self.writes.append(storage)


@dataclass
class Notes:
    """One forward as it was seen.

    ``loose`` are packs made outside of any call, ``by_node`` the value behind each (sequence number, output number).
    ``holds`` and ``index`` (final number by provisional one) are there once the graph is assembled.
    """

    source: str
    ledger: Ledger = field(default_factory=Ledger)
    calls: list[OpenCall] = field(default_factory=list)
    loose: list[weakref.ref[Packed]] = field(default_factory=list)
    by_node: dict[tuple[int, int], int] = field(default_factory=dict)
    first_node: int = 0
    holds: list[Hold] = field(default_factory=list)
    index: dict[int | tuple[str, int], int] = field(default_factory=dict)

    def held(self) -> set[int]:
        """The storages that autograd nodes hold now."""
        packs = (ref() for ref in (*(ref for call in self.calls for ref in call.packs), *self.loose))
        return {p.storage for p in packs if p is not None and p.storage is not None}
