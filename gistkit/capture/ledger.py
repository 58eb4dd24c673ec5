"""The record of one forward as it runs: calls, saved tensors, and the storages and values, numbered as they appear. A
storage is known by its StorageImpl's address, which a weak reference keeps from being used again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gistkit.capture.fakes import empty_fake
from gistkit.codecs import unchanged
from gistkit.ir import ModuleCall, Save, Value
from gistkit.kernels import is_dense

NO_PRODUCER = -1
T = TypeVar("T")
_LEAVES = {int, float, bool, str, type(None), torch.dtype, torch.device}
"""What is most frequent among arguments and holds no tensors."""


@dataclass
class StorageEntry:
    """One storage under observation; ``producer`` is the producing call's provisional number, see OpenCall."""

    id: int
    ref: StorageWeakRef
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    producer: Any
    version: int = 0
    escapes: bool = False
    density: float | None = None


def tensors_in(item: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclass-like outputs, depth first."""
    if isinstance(item, torch.Tensor):
        yield item
        return
    parts: Any = ()
    if isinstance(item, (list, tuple, set)):
        parts = item
    elif isinstance(item, dict):
        parts = item.values()
    elif hasattr(item, "__dataclass_fields__") and not isinstance(item, type):
        parts = (getattr(item, name) for name in item.__dataclass_fields__)
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield part
        elif type(part) not in _LEAVES:
            yield from tensors_in(part)


class Ledger:
    """Storages and values of one forward."""

    def __init__(self) -> None:
        self.storages: list[StorageEntry] = []
        self.values: list[Value] = []
        self._by_address: dict[int, StorageEntry] = {}
        self._value_ids: dict[tuple, int] = {}
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}

    def known(self, identity: int | None) -> StorageEntry | None:
        """The entry of a storage identity, which stays unique as long as the ledger is there."""
        return None if identity is None else self._by_address.get(identity)

    def storage_of(self, t: torch.Tensor, kind: str, producer: Any = NO_PRODUCER) -> StorageEntry | None:
        """The entry of a tensor's storage, new ones with the given kind and producer; None for a tensor without one."""
        address = identity(t)
        entry = self.known(address)
        if entry is None and address is not None:
            storage = t.untyped_storage()
            about = storage.nbytes(), t.dtype, tuple(t.shape), kind, producer
            entry = self._by_address[address] = StorageEntry(len(self.storages), StorageWeakRef(storage), *about)
            self.storages.append(entry)
        return entry

    def value_of(self, t: torch.Tensor, entry: StorageEntry, producer: Any, version: int | None = None) -> int:
        """The id of what a tensor holds now (or held at ``version``)."""
        version = entry.version if version is None else version
        key = (entry.id, version, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)
        found = self._value_ids.get(key)
        if found is None:
            found = self._value_ids[key] = len(self.values)
            whole = t.numel() * t.element_size() == entry.nbytes and is_dense(t)
            geometry = (tuple(t.shape), dtype_name(t.dtype), whole)
            self.values.append(Value(found, entry.id, version, *geometry, producer, t._is_view()))
        return found

    def watch(self, t: torch.Tensor, entry: StorageEntry) -> None:
        """Remember an activation's tensor object, to see after the forward whether somebody still holds it."""
        if entry.kind == "activation":
            self._alive[id(t)] = weakref.ref(t)

    def survivors(self) -> list[torch.Tensor]:
        return living(self._alive.values())


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def identity(t: torch.Tensor) -> int | None:
    """The identity of a tensor's storage; None for tensors without one (sparse, transformed, not yet initialised)."""
    if t.layout != torch.strided or t.is_nested:
        return None
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):
        return None


class Packed:
    """What the recorder's hook keeps of a saved tensor: itself, its version and value, its node's sequence number. It
    must be detached where it is to be kept, as a result would keep its own node alive.
    After :meth:`lighten` unwritten memory of its geometry stands in for it, made anew at each look: of fake tensors
    that shows how long a storage lives that nothing keeps for backward."""

    def __init__(self, tensor: torch.Tensor, node: int, storage: int | None) -> None:
        self._tensor: torch.Tensor | None = tensor
        self.version, self.value = tensor._version, -1
        self.node, self.storage = node, storage
        self.like: tuple | None = None
        """Size, stride, dtype and device; None for a tensor without a storage, which may have none of these."""
        self._mode = getattr(tensor, "fake_mode", None)
        if storage is not None:
            self.like = tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device

    @property
    def tensor(self) -> torch.Tensor:
        """The saved tensor, or what stands in for it."""
        if self._tensor is not None:
            return self._tensor
        assert self.like is not None
        size, stride, dtype, device = self.like
        if self._mode is not None:
            return empty_fake(self._mode, *self.like)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def lighten(self) -> None:
        if self.like is not None:
            self._tensor = None

    def checked(self) -> torch.Tensor:
        """The tensor; PyTorch's own error if it was written to in between."""
        return self.tensor if self._tensor is None else unchanged(self._tensor, self.version)


@dataclass
class OpenCall:
    """One call of the running forward. ``number`` counts calls as they come; a hidden function's is ``("node", sequence
    number)``. ``lo`` <= x < ``hi`` are the sequence numbers of its autograd nodes. ``reads`` and ``writes`` are ordered
    sets of storages. ``versions`` holds its operands until it returns. ``split``: whether gistkit's own takes its
    backward in two halves. ``packed``: storage, dtype and shape of each of its packs."""

    number: int | tuple[str, int]
    op: str
    module: str
    lo: int
    hi: int = 0
    covered: int = -1
    split: bool = False
    options: dict | None = None
    operands: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    reads: dict[int, None] = field(default_factory=dict)
    writes: dict[int, None] = field(default_factory=dict)
    inplace: bool = False
    versions: list[tuple[torch.Tensor, StorageEntry, int]] = field(default_factory=list)
    packs: list[weakref.ref[Packed]] = field(default_factory=list)
    packed: list[tuple[int | None, str, tuple[int, ...]]] = field(default_factory=list)


@dataclass
class Notes:
    """One forward as it was seen. ``modules``: what modules were given, with numbers of calls as they came, and the
    first sequence number of their nodes and that behind. ``loose`` are packs made outside of any call, ``by_node``
    the value behind each (sequence number, output number). ``holds`` (the call that saved, the sequence number of the
    node that holds, what) and ``index`` (final number by provisional one) are there once the graph is assembled."""

    source: str
    ledger: Ledger = field(default_factory=Ledger)
    calls: list[OpenCall] = field(default_factory=list)
    modules: list[tuple[ModuleCall, tuple[int, int]]] = field(default_factory=list)
    loose: list[weakref.ref[Packed]] = field(default_factory=list)
    by_node: dict[tuple[int, int], int] = field(default_factory=dict)
    first_node: int = 0
    holds: list[tuple[int, int, Save]] = field(default_factory=list)
    index: dict[int | tuple[str, int], int] = field(default_factory=dict)

    def modules_by_index(self) -> tuple[ModuleCall, ...]:
        """The modules' calls by their final numbers, hidden ones among them."""
        found = []
        hidden = [(number[1], i) for number, i in self.index.items() if isinstance(number, tuple)]
        for module, (first, end) in self.modules:
            own = [i for node, i in hidden if first <= node < end]
            own += [self.index[n] for n in (module.begin, module.end - 1) if module.end > module.begin]
            if own:
                found.append(replace(module, begin=min(own), end=max(own) + 1))
        return tuple(found)

    def packs(self) -> list[Packed]:
        """All saved tensors whose nodes live, those of calls first."""
        return living([*(ref for call in self.calls for ref in call.packs), *self.loose])


def living(refs: Iterable[weakref.ref[T]]) -> list[T]:
    """What the references still lead to."""
    return [found for found in (ref() for ref in refs) if found is not None]
