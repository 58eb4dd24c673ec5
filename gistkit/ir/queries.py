"""What planning asks a SavedGraph: what a storage holds when backward comes, who made that, and who reads it."""

from __future__ import annotations

from dataclasses import dataclass

from gistkit.formats import item_bytes
from gistkit.ir.saved_graph import Call, Save, SavedGraph, SavedStorage, Value


def numel(storage: SavedStorage) -> int:
    """Elements of the dtype that the storage was first seen with."""
    return storage.nbytes // item_bytes(storage.dtype)


def written_late(graph: SavedGraph) -> set[int]:
    """Storages that PyTorch fills in after it has shown them to saved-tensor hooks: they are kept as they are."""
    late = ("RreluWithNoiseBackward0", "noise")
    return {s.storage for c in graph.calls for s in c.saves if (s.node, s.field) == late}


@dataclass(frozen=True)
class Uses:
    """What backward reads of one kept storage. ``value`` is what it finds there, None where the storage is saved in
    parts or at several versions. ``relu`` is the covered ReLU whose output that is: it reads the signs only.
    ``readers`` are the (call, save) pairs of the others, whose backward reads the values."""

    value: Value | None
    relu: Call | None
    readers: tuple[tuple[Call, Save], ...]


class Reading:
    """Answers of one graph, remembered by storage."""

    def __init__(self, graph: SavedGraph) -> None:
        self.graph = graph
        self._makers: dict[tuple[int, int], tuple[Call, Value]] = {}
        self._uses: dict[int, Uses] = {}
        for call in graph.calls:
            for value in (graph.values[i] for i in call.results):
                if value.storage in call.writes:
                    self._makers.setdefault((value.storage, value.version), (call, value))

    def uses(self, storage: int) -> Uses:
        """What backward reads of a storage; remembered."""
        if storage not in self._uses:
            value = self.saved(storage)
            made = None if value is None else self.made((value.storage, value.version))
            # the covered ReLU whose output the value holds, as it is or through a view of all of it
            relu = made[0] if made and made[1].whole and made[0].op == "relu" and made[0].covered >= 0 else None
            own = -1 if relu is None else relu.index
            readers = tuple((c, s) for c, s in self.graph.savers(storage) if s.read and c.index != own)
            self._uses[storage] = Uses(value, relu, readers)
        return self._uses[storage]

    def saved(self, storage: int) -> Value | None:
        """What backward will find in the storage, seen as a whole; None where that is not one value."""
        values = [self.graph.values[s.value] for _, s in self.graph.savers(storage) if s.value >= 0]
        if len({v.version for v in values}) != 1:
            return None
        return next((v for v in values if v.whole), None)

    def made(self, key: tuple[int, int]) -> tuple[Call, Value] | None:
        """The call that wrote a (storage, version) and the value it returned; None for inputs and op internals."""
        return self._makers.get(key)

    def maker(self, value: Value) -> Call | None:
        """The call that made exactly this value; None where the value is a view of what was made."""
        made = self.made((value.storage, value.version))
        return made[0] if made is not None and made[1].id == value.id else None

    def readers_after(self, call: Call, storage: int) -> list[Call]:
        return [c for c in self.graph.readers(storage) if c.index > call.index]

    def operand(self, call: Call, position: int = 0) -> Value:
        return self.graph.values[call.operands[position]]
