"""SavedGraph: the calls of one forward and the storages that its backward keeps. Pure data, JSON both ways.

A *call* is one torch function call of the forward (``relu``, ``conv2d``, ``add``...), in order. A *storage* is one
block of memory that some call reads, writes or saves. A *value* is what a storage holds between two writes, seen
through one geometry: an in-place ReLU has one storage and two values. Ids are dense: ``graph.storages[i].id == i``,
``graph.values[i].id == i``, ``graph.calls[i].index == i``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from gistkit.ir.serial import from_json, to_json
from gistkit.ir.tasks import Block, Task, by_key

LIBRARY = "library"
"""The ``source`` of a graph that shows a step as the papers' frameworks ran it."""


@dataclass(frozen=True)
class Value:
    """One storage at one version (0, 1, ... counted by writes) through one geometry. ``whole`` is True where shape and
    strides cover the storage without gaps or overlaps. ``producer`` is the call that returned it first, -1 where none
    of this region did. ``view``: for autograd it is one, if of a tensor that the call made inside."""

    id: int
    storage: int
    version: int
    shape: tuple[int, ...]
    dtype: str
    whole: bool
    producer: int
    view: bool = False


@dataclass(frozen=True)
class Save:
    """One saved tensor: the storage it lies in, the node and field that hold it, its geometry. ``field`` is autograd's
    name without ``_saved_`` (``result``, ``self``, ``input``, ``weight``), ``?`` where autograd does not tell; ``read``
    is False where backward uses the shape only (max-pool's and average-pool's ``self``), unless the call is hidden.
    ``value`` is the id of the saved value (-1: unknown)."""

    storage: int
    node: str
    field: str
    shape: tuple[int, ...]
    dtype: str
    read: bool = True
    value: int = -1


@dataclass(frozen=True)
class Passing:
    """A tensor that a call saved for a node that was gone again when the forward was over (its result was detached):
    backward never asks for it. ``position``: of how many of the call's ``saves`` it comes after."""

    position: int
    storage: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One function call: canonical name, covered-call ordinal, storages read and written, tensors saved.

    ``covered`` is the running number among the calls that the runtime interposes (-1 for all others): the runtime finds
    its decision by it. ``inplace`` is True where the call overwrote its first operand. ``module`` is the qualified name
    of the module whose forward made the call ('' at the root). ``operands`` and ``results`` are value ids, a covered
    call's operands in the order of its named arguments. ``options`` are a covered call's arguments that are no tensors;
    of another call ``opaque``, the type of an argument that cannot be kept to run it once more, where it has one, or
    ``generator``, where it draws from one of its own.
    ``hidden``: no torch function call, but known by its backward node or by what it saved (a custom autograd Function).
    """

    index: int
    op: str
    covered: int
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    saves: tuple[Save, ...] = ()
    inplace: bool = False
    options: dict | None = None
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    hidden: bool = False
    passing: tuple[Passing, ...] = ()


@dataclass(frozen=True)
class ModuleCall:
    """One call of the module ``name`` on nothing but tensors and plain values: the forward's calls that it made, from
    ``begin`` to before ``end``, and the storages ``given`` of its tensors."""

    name: str
    begin: int
    end: int
    given: tuple[int, ...]


@dataclass(frozen=True)
class SavedStorage:
    """One storage: bytes, dtype and shape at its first sight, producing call (-1: none in this region). ``density`` is
    the measured share of non-zero elements or None; ``escapes`` is True where something outside the recorded calls can
    still read it after the region (an output, a tensor that the model put away)."""

    id: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    kind: str
    producer: int
    escapes: bool = False
    density: float | None = None


@dataclass(frozen=True)
class StateTensor:
    """One parameter or buffer of the model: its qualified name, dtype, shape, whether it needs a gradient."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class SavedGraph:
    """All calls, storages and values of one training forward; see the module docstring. ``tasks`` and ``blocks``
    (:mod:`gistkit.ir.tasks`) are those of the whole step, backward included, where it was captured with
    ``backward=True``, else empty. ``batch`` is the size of the inputs' first dimension, 0 if unknown; ``least_rows``
    how many rows of it a sub-batch must have to take the same way through the model, as far as asked; ``small`` is the
    step of so many rows, where one of fewer than the batch was captured. ``state`` are the model's parameters and
    buffers, ``training`` whether it was in training mode. ``modules``: those of a capture that ran on tensors and plain
    values alone."""

    calls: tuple[Call, ...]
    storages: tuple[SavedStorage, ...]
    source: str = "fake"
    values: tuple[Value, ...] = ()
    tasks: tuple[Task, ...] = ()
    blocks: tuple[Block, ...] = ()
    batch: int = 0
    least_rows: int = 1
    state: tuple[StateTensor, ...] = ()
    training: bool = True
    small: SavedGraph | None = None
    modules: tuple[ModuleCall, ...] = ()

    @property
    def most_parts(self) -> int:
        """In how many sub-batches the batch may be taken, 1 if nothing is known of it."""
        return max(1, self.batch // self.least_rows)

    @cached_property
    def _readers(self) -> dict[int, list[Call]]:
        return by_key((storage, call) for call in self.calls for storage in call.reads)

    @cached_property
    def _savers(self) -> dict[int, list[tuple[Call, Save]]]:
        return by_key((save.storage, (call, save)) for call in self.calls for save in call.saves)

    @cached_property
    def _writers(self) -> dict[int, list[Call]]:
        return by_key((storage, call) for call in self.calls for storage in call.writes)

    def readers(self, storage: int) -> tuple[Call, ...]:
        """Calls that read the storage in forward, in order."""
        return tuple(self._readers.get(storage, ()))

    def savers(self, storage: int) -> tuple[tuple[Call, Save], ...]:
        """(call, save) pairs that keep the storage for backward, in order."""
        return tuple(self._savers.get(storage, ()))

    def writers(self, storage: int) -> tuple[Call, ...]:
        """Calls that wrote to the storage, in order: its producer, then in-place calls."""
        return tuple(self._writers.get(storage, ()))

    def made_of(self, kind: str) -> frozenset[int]:
        """Storages of a kind and all that calls make of them."""
        found = {s.id for s in self.storages if s.kind == kind}
        for call in self.calls:
            if not found.isdisjoint(call.reads):
                found.update(call.writes)
        return frozenset(found)

    @cached_property
    def trained(self) -> frozenset[int]:
        """Storages that come of parameters, unlike masks and positions."""
        return self.made_of("parameter")

    @cached_property
    def masks(self) -> frozenset[int]:
        """Storages that come of no parameter, are not kept, and are read beside such as do: attention masks, and what
        additions spread over a larger result, as a mask over scores."""
        sizes, trained, found = [s.nbytes for s in self.storages], self.trained, set[int]()
        for call in (c for c in self.calls if c.op in ("add", "scaled_dot_product_attention")):
            made = sum(sizes[s] for s in call.writes)
            if not trained.isdisjoint(call.reads):
                found.update(s for s in call.reads if call.op != "add" or sizes[s] < made)
        return frozenset(s for s in found - trained - set(self._savers) if self.storages[s].kind == "activation")

    def kept(self) -> tuple[SavedStorage, ...]:
        """Storages that plain PyTorch keeps for backward, parameters and buffers left out."""
        return tuple(s for s in self.storages if s.id in self._savers and s.kind in ("input", "activation"))

    @property
    def kept_bytes(self) -> int:
        """Bytes that plain PyTorch keeps for backward, each storage once, parameters left out."""
        return sum(s.nbytes for s in self.kept())

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the covered calls and their dataflow, shapes left out, and of the dtypes and shapes of the model's
        parameters and buffers: equal for every batch size, another for other kernels or widths."""
        flow = [(c.op, c.covered, c.reads, c.writes, c.inplace) for c in self.calls if c.covered >= 0]
        return _hash(flow) + (_hash([(t.dtype, t.shape) for t in self.state]) if self.state else "")

    def to_json(self) -> str:
        """The graph as JSON text."""
        return to_json(self)

    @staticmethod
    def from_json(text: str) -> SavedGraph:
        """The graph of :meth:`to_json`'s text. Raises ValueError for any other: where it is none."""
        return from_json(SavedGraph, text)[0]


def _hash(item: list) -> str:
    return hashlib.sha256(json.dumps(item).encode()).hexdigest()[:16]
