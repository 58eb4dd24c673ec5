"""One storage, one stash: what stands in for a storage between its two uses, and who reads it.

A ``Stash`` holds the content of one storage in another form (a codec's payload, or a recipe that rebuilds it). Every
backward node that needs the storage holds a ``Reader`` of it; the last one that goes frees the payload. The table is
only consulted while a forward runs: a weak reference keeps a storage's control block, so its address cannot be reused
meanwhile, and the version counter tells an in-place update apart."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch._prims_common import suggest_memory_format

from gistkit.codecs import Encoded
from gistkit.kernels import is_dense
from gistkit.nn.keep import Coded, Kept, is_retained

DENSE_VALUES = methodcaller("dense")
"""The unpack half of a saved-tensor hook whose pack half gives a hold."""


def covers(x: torch.Tensor) -> bool:
    """True where x is dense and fills its storage from the first byte to the last."""
    nbytes = x.untyped_storage().nbytes()
    return nbytes == x.nbytes and is_dense(x) and x.storage_offset() == 0


def whole(x: torch.Tensor) -> torch.Tensor:
    """x where it covers its storage, else the flat run of all that the storage holds."""
    if covers(x):
        return x
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


class Body(Kept, Protocol):
    """What a stash holds in place of its storage: its bytes on the device now, its values, and the input gradient of a
    ReLU whose whole output it is. Some have ``density`` too, the share of elements stored (None: not known)."""

    @property
    def nbytes(self) -> int: ...


class CodedBody(Coded):
    """A codec's payload of a dense tensor."""

    @property
    def nbytes(self) -> int:
        return self.encoded.nbytes

    @property
    def density(self) -> float | None:
        stored, n = self.encoded.nonzeros, self.encoded.numel
        return None if stored is None or not n else stored / n


class SettledBody(CodedBody):
    """A payload that is settled before it is decoded, by a call that may wait for the device: where decoding a scratch
    takes several times the tensor (``Sparse.decodes_scratch``), which no budget counts."""

    def __init__(self, encoded: Encoded, settle: Callable[[Encoded], None]) -> None:
        super().__init__(encoded)
        self._settle = settle

    def dense(self) -> torch.Tensor:
        self._settle(self.encoded)
        return super().dense()


class RebuiltBody:
    """y made anew of kept tensors by ``dense`` (:mod:`gistkit.runtime.rebuild.terms`); it holds no bytes of its own."""

    __slots__ = ("dense",)
    nbytes = 0

    def __init__(self, dense: Callable[..., torch.Tensor]) -> None:
        self.dense = dense

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.threshold_backward(grad, self.dense(), 0)


class Stash:
    """The stand-in for one storage: its body, and what the report says of it. ``node``: the ReLU's node that made the
    stashed tensor and shares its values with their readers; None where nothing is shared, and after the forward, as
    that node holds the stash. Shared values are made once for the last two readers: a ReLU's node runs right behind the
    last node that reads its output, so the values stay from the one to the other. Earlier readers get values of their
    own."""

    __slots__ = ("_readers", "_values", "body", "codec", "node", "plain_bytes", "reason", "storage")

    def __init__(
        self, body: Body, storage: int, codec: str, plain_bytes: int, reason: str = "", node: Any = None
    ) -> None:
        self.body, self.storage, self.codec, self.plain_bytes = body, storage, codec, plain_bytes
        self.reason, self.node, self._readers = reason, node, 0 if node is None else 1
        self._values: torch.Tensor | None = None

    def dense(self, _: Any = None) -> torch.Tensor:
        values = self._values
        if is_retained():
            return self.body.dense() if values is None else values
        self._readers -= 1
        if values is None:
            values = self.body.dense()
            if self._readers == 1:
                self._values = values
        elif self._readers <= 0:
            self._values = None
        return values

    def source(self) -> tuple[torch.Tensor, bool]:
        """(values, whether the caller may overwrite them); no reader is counted."""
        if self._values is not None:
            return self._values, False
        return self.body.dense(), getattr(self.body, "fresh", True)


class Reader:
    """One node's view of a stash: the geometry of the tensor that it saved."""

    __slots__ = ("_geometry", "stash")

    def __init__(self, stash: Stash, x: torch.Tensor) -> None:
        self.stash = stash
        self._geometry = (x.shape, x.stride(), x.storage_offset())

    def dense(self, _: Any = None) -> torch.Tensor:
        stash = self.stash
        base = stash.body.dense() if stash._values is None else stash._values
        size, stride, offset = self._geometry
        if base.shape == size and base.stride() == stride:
            return base
        return base.as_strided(size, stride, offset)

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return self.stash.body.relu_backward(grad)


class Shape:
    """Stands for a tensor whose values backward never reads, a pool's input: a tensor of its geometry without memory.
    PyTorch's pools bring it into the memory format that its strides suggest, where it is not in it; a copy would read
    what is not there. So the strides are those of that format, which is all that they know of them."""

    nbytes = 0

    def __init__(self, x: torch.Tensor) -> None:
        stride, last = x.stride(), {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
        if not x.is_contiguous() and not (last and x.is_contiguous(memory_format=last)):
            stride = torch.empty(x.shape, device="meta", memory_format=suggest_memory_format(x)).stride()
        self._like = (x.size(), stride, x.dtype, x.device)

    def dense(self) -> torch.Tensor:
        size, stride, dtype, device = self._like
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        made.untyped_storage().resize_(0)
        return made


class StashTable:
    """The stashes of one forward, found by live storage and version."""

    def __init__(self) -> None:
        self.stashes: list[Stash] = []
        self._entries: dict[int, tuple[Stash, int, torch.dtype]] = {}
        self._names: dict[int, Stash] = {}
        self._tags: dict[int, int] = {}
        self._weak: set[int] = set()

    def __del__(self) -> None:
        self.clear()

    def add(self, x: torch.Tensor, storage: torch.UntypedStorage, stash: Stash) -> None:
        """Have that stash found by tensors over x's ``storage`` as it is now."""
        self.stashes.append(stash)
        address = storage._cdata
        if address not in self._weak:
            # what StorageWeakRef holds, without its two calls of Python: no other storage gets the address meanwhile
            self._weak.add(storage._weak_ref())  # type: ignore[arg-type]
        self._entries[address] = (stash, x._version, x.dtype)
        if stash.storage >= 0:
            self._names[stash.storage] = stash

    def find(self, x: torch.Tensor) -> Stash | None:
        # no need to ask whether the weak reference has expired: it keeps the address from being another storage's
        address = x.untyped_storage()._cdata
        if address not in self._entries:
            return None
        stash, version, dtype = self._entries[address]
        return None if version != x._version or dtype is not x.dtype else stash

    def hold(self, x: torch.Tensor) -> Stash | Reader | None:
        """A further hold on x: the shared values where x is what their node made, counted down by :meth:`Stash.dense`,
        else a reader of its own; None where x has no stash."""
        stash = self.find(x)
        if stash is None:
            return None
        node = stash.node
        if node is None or node is not x.grad_fn:
            return Reader(stash, x)
        stash._readers += 1
        return stash

    def tag(self, x: torch.Tensor) -> None:
        """Remember that x's storage, as it is now, is worth zero-value compression."""
        storage = x.untyped_storage()
        self._tags[storage._cdata] = x._version
        if storage._cdata not in self._weak:
            self._weak.add(storage._weak_ref())  # type: ignore[arg-type]

    def tagged(self, x: torch.Tensor) -> bool:
        return self._tags.get(x.untyped_storage()._cdata) == x._version

    def named(self, storage: int) -> Stash | None:
        return self._names.get(storage)

    def clear(self) -> None:
        """Forget everything; nodes keep what they hold."""
        for stash in self.stashes:
            stash.node = None
        for known in (self.stashes, self._entries, self._names, self._tags):
            known.clear()
        weak, self._weak = self._weak, set()
        for reference in weak:
            torch.UntypedStorage._free_weak_ref(reference)
