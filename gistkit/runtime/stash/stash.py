"""One storage, one stash: what stands in for a storage between its two uses, and who reads it.

A ``Stash`` holds the content of one storage in another form (a codec's payload, or a recipe that rebuilds it). Every
backward node that needs the storage holds a ``Reader`` of the same stash. Lifetimes are Python's: the last node that
lets go of its reader frees the payload; the table below is only consulted while a forward runs.

Identity is the live storage: a weak reference keeps the storage's control block, so its address cannot be reused while
the table knows it, and the version counter tells an in-place update apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch._prims_common import suggest_memory_format

from gistkit.kernels import flat, is_dense
from gistkit.nn.keep import Coded, Kept, SavedAsIs, is_retained, rows_from

Rows = tuple[int, int] | None
DENSE_VALUES = methodcaller("dense")
"""The unpack half of a saved-tensor hook whose pack half gives a hold."""


def covers(x: torch.Tensor) -> bool:
    """True where x is dense and fills its storage from the first byte to the last."""
    return is_dense(x) and fills(x)


def fills(x: torch.Tensor) -> bool:
    """The same of an x that is dense."""
    return x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.numel() * x.element_size()


def whole(x: torch.Tensor) -> torch.Tensor:
    """x where it covers its storage, else the flat run of all that the storage holds."""
    if covers(x):
        return x
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def rows_of(kept: Kept, start: int, stop: int) -> torch.Tensor:
    """Rows start..stop of a kept tensor, decoding no more than them where the hold can."""
    dense_rows = getattr(kept, "dense_rows", None)
    return kept.dense()[start:stop] if dense_rows is None else dense_rows(start, stop)


class Body(Kept, Protocol):
    """What a stash holds in place of its storage: its bytes on the device now, its values, all of them or a range in
    storage order, and the input gradient of a ReLU whose whole output it is. Some have ``dense_rows(start, stop)`` too,
    which decodes no more than these rows of the first dimension, and ``density``, the share of elements stored (None:
    not known)."""

    @property
    def nbytes(self) -> int: ...
    def dense_range(self, start: int, stop: int) -> torch.Tensor: ...


class CodedBody(Coded):
    """A codec's payload of a dense tensor."""

    @property
    def nbytes(self) -> int:
        return self.encoded.nbytes

    @property
    def density(self) -> float | None:
        stored, n = self.encoded.nonzeros, self.encoded.numel
        return None if stored is None or not n else stored / n


class RebuiltBody:
    """y as a term over other kept tensors (:mod:`gistkit.runtime.rebuild.terms`); it holds no bytes of its own."""

    __slots__ = ("_row_elements", "_stride", "_term")
    nbytes = 0

    def __init__(self, term: Any, y: torch.Tensor) -> None:
        self._term, self._stride, self._row_elements = term, y.stride(), y.numel() // y.shape[0]

    def dense(self, rows: Rows = None) -> torch.Tensor:
        values, stride = self._term.dense(rows), self._stride
        if values.stride() == stride:
            return values
        return torch.empty_strided(values.size(), stride, dtype=values.dtype, device=values.device).copy_(values)

    def dense_rows(self, start: int, stop: int) -> torch.Tensor:
        return self.dense((start, stop))

    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        per_row = self._row_elements
        first, last = start // per_row, -(-stop // per_row)
        return flat(self.dense((first, last)))[start - first * per_row : stop - first * per_row]

    relu_backward = SavedAsIs.relu_backward


class SharedValues:
    """A body whose values are made once for the last two of its readers: a ReLU's node runs right behind the last
    node that reads its output, so the values stay from the one to the other. Earlier readers get values of their own.
    What else a body has is the body's."""

    __slots__ = ("_body", "_readers", "_values")
    nbytes: int
    dense_range: Any
    relu_backward: Any

    def __init__(self, body: Any, readers: int = 0) -> None:
        self._body, self._readers = body, readers
        self._values: torch.Tensor | None = None

    def join(self) -> SharedValues:
        """Itself, for one reader more; every :meth:`dense` counts one down."""
        self._readers += 1
        return self

    def __call__(self, x: torch.Tensor) -> SharedValues:
        return self  # what a saved-tensor hook makes of x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def dense(self) -> torch.Tensor:
        values = self._values
        if is_retained():
            return self._body.dense() if values is None else values
        self._readers -= 1
        if values is None:
            values = self._body.dense()
            if self._readers == 1:
                self._values = values
        elif self._readers <= 0:
            self._values = None
        return values

    def source(self) -> tuple[torch.Tensor, bool]:
        """(values, whether the caller may overwrite them) for a rebuild that starts from them; no reader is counted."""
        values = self._values
        return (self._body.dense(), True) if values is None else (values, False)

    def dense_rows(self, start: int, stop: int) -> torch.Tensor:
        values = self._values
        return rows_of(self._body, start, stop) if values is None else values[start:stop]


def source_of(kept: Kept, rows: Rows = None) -> tuple[torch.Tensor, bool]:
    """(values or rows of them, whether they may be overwritten) of a kept tensor that a rebuild starts from."""
    if type(kept) is SharedValues and rows is None:
        return kept.source()
    values = kept.dense() if rows is None else rows_of(kept, *rows)
    return values, getattr(kept, "fresh", not isinstance(kept, SavedAsIs))


@dataclass(eq=False, slots=True)
class Stash:
    """The stand-in for one storage: its body, and what the report says of it. ``node``: the ``grad_fn`` of the tensor
    that was stashed; None after the forward, as that node holds the stash."""

    body: Body
    storage: int
    codec: str
    plain_bytes: int
    reason: str = ""
    node: Any = None

    def hold(self, x: torch.Tensor) -> SharedValues | Reader:
        """A hold for one node more on the saved x: shared values where x is the very tensor that was stashed."""
        body = self.body
        return body.join() if type(body) is SharedValues and self.node is x.grad_fn else Reader(self, x)


class Reader:
    """One node's view of a stash: the geometry of the tensor that it saved."""

    def __init__(self, stash: Stash, x: torch.Tensor) -> None:
        self.stash = stash
        self._geometry = (x.size(), x.stride(), x.storage_offset())

    def __call__(self, x: torch.Tensor) -> Reader:
        return self  # what a saved-tensor hook makes of x

    def dense(self) -> torch.Tensor:
        body = self.stash.body
        base = body.source()[0] if type(body) is SharedValues else body.dense()
        size, stride, offset = self._geometry
        if base.size() == size and base.stride() == stride:
            return base
        return base.as_strided(size, stride, offset)

    def dense_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of the saved tensor; only they are decoded where its first dimension is its outermost."""
        size, stride, offset = self._geometry
        rows = None if offset else rows_from(self.stash.body.dense_range, size, stride, start, stop)
        return self.dense()[start:stop] if rows is None else rows

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return self.stash.body.relu_backward(grad)


class Shape:
    """Stands for a tensor whose values backward never reads, a pool's input: a tensor of its geometry without memory.

    PyTorch's pools bring it into the memory format that its strides suggest, where it is not in it; a copy would read
    what is not there. So the strides are those of that format, which is all that they know of them.
    """

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
        self._entries: dict[tuple[int, int], tuple[Stash, torch.dtype]] = {}
        self._names: dict[int, Stash] = {}
        self._tags: set[tuple[int, int]] = set()
        self._weak: set[int] = set()

    def __del__(self) -> None:
        self.clear()

    def _known(self, x: torch.Tensor) -> tuple[int, int]:
        """The key of x's storage as it is now, which nothing else has before the table is cleared."""
        storage = x.untyped_storage()
        address = storage._cdata
        if address not in self._weak:
            # what StorageWeakRef holds, without its two calls of Python
            self._weak.add(storage._weak_ref())  # type: ignore[arg-type]
        return address, x._version

    def add(self, x: torch.Tensor, stash: Stash) -> None:
        self._entries[self._known(x)] = (stash, x.dtype)
        if stash.storage >= 0:
            self._names[stash.storage] = stash

    def find(self, x: torch.Tensor) -> Stash | None:
        # no need to ask whether the weak reference has expired: it keeps the address from being another storage's
        entry = self._entries.get((x.untyped_storage()._cdata, x._version))
        return None if entry is None or entry[1] != x.dtype else entry[0]

    def tag(self, x: torch.Tensor) -> None:
        """Remember that x's storage, as it is now, is worth zero-value compression."""
        self._tags.add(self._known(x))

    def tagged(self, x: torch.Tensor) -> bool:
        return (x.untyped_storage()._cdata, x._version) in self._tags

    def named(self, storage: int) -> Stash | None:
        return self._names.get(storage)

    def stashes(self) -> list[Stash]:
        return list({id(s): s for s, _ in self._entries.values()}.values())

    def clear(self) -> None:
        """Forget everything; nodes keep what they hold."""
        for stash, _ in self._entries.values():
            stash.node = None
        self._entries.clear()
        self._names.clear()
        self._tags.clear()
        while self._weak:
            torch.UntypedStorage._free_weak_ref(self._weak.pop())
