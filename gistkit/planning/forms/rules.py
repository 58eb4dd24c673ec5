"""The rules of the Gist policy, one storage at a time; the table is in :mod:`gistkit.planning.policies.gist_rules`."""

from __future__ import annotations

from collections.abc import Mapping

from gistkit import formats
from gistkit.codecs import CODECS, dtype_of
from gistkit.ir import (
    KERNEL_DTYPES,
    Call,
    Decision,
    Reading,
    Save,
    SavedGraph,
    SavedStorage,
    Value,
    numel,
    written_late,
)
from gistkit.planning.cost import Densities
from gistkit.planning.forms.choices import map_bits, mask_carrier
from gistkit.planning.forms.lossy import intolerant, may_narrow, rounded
from gistkit.planning.forms.rebuild import MAX_DEPTH, depth, recipe_of

SMALL_BYTES = 4096
PAYS = 0.95
"""An encoding has to save a twentieth of the dense bytes to be worth its two passes."""


class Planner:
    """Decides every kept storage of one graph, each once."""

    def __init__(
        self, graph: SavedGraph, lossy: str | None, densities: Mapping[int, float] | None, *, rebuild: bool = True
    ) -> None:
        self.reading = Reading(graph)
        self.densities = Densities(self.reading, densities)
        self._graph = graph
        self._lossy = lossy
        self._rebuilds = rebuild
        self._kept = {s.id for s in graph.kept()}
        self._late = written_late(graph)
        self._decided: dict[int, Decision] = {}

    def decide(self, storage: int) -> Decision | None:
        """The decision for a storage, None where plain PyTorch does not keep it either."""
        if storage not in self._kept:
            return None
        if storage not in self._decided:
            self._decided[storage] = self._decision(self._graph.storages[storage])
        return self._decided[storage]

    def predicted_bytes(self, decision: Decision) -> int:
        """Bytes that a decision keeps for backward."""
        storage = self._graph.storages[decision.storage]
        n, mask = numel(storage), formats.mask1_bytes(numel(storage)) if decision.mask else 0
        if decision.codec in ("rebuild", "drop"):
            return mask
        if decision.codec == "dense":
            return storage.nbytes
        density = self._density(storage)
        return CODECS[decision.codec].predicted_bytes(n, dtype_of(storage.dtype), density) + mask

    def _density(self, storage: SavedStorage) -> float | None:
        saved = self.reading.saved(storage.id)
        return None if saved is None else self.densities.of(storage.id, saved.version)

    def _decision(self, s: SavedStorage) -> Decision:
        if s.kind == "input":
            return _dense(s, "held by the caller")
        if s.id in self._late:
            return _dense(s, "written only after it is saved")
        own = self._own_of_an_op(s)
        if own is not None:
            return own
        if s.nbytes < SMALL_BYTES:
            return _dense(s, "too small to pay")
        if s.dtype == "bool" and self.reading.saved(s.id) is not None:
            return Decision(s.id, "bits", reason="a bool is 1 bit")
        if s.dtype not in KERNEL_DTYPES and s.dtype != "float64":
            return _dense(s, f"no codec for {s.dtype}")
        value = self.reading.saved(s.id)
        if value is None:
            return _dense(s, "saved in parts, or as something else than one whole value")
        relu = self.reading.relu_behind(value)
        readers = self.reading.value_readers(s.id, relu)
        if not readers and relu is None:
            return Decision(s.id, "drop", reason="backward reads its shape only")
        if s.dtype not in KERNEL_DTYPES:
            return _dense(s, f"no codec for {s.dtype}")
        if s.escapes:
            return _dense(s, "still held outside the forward (an output, or put away by the model)")
        if not readers and relu is not None:
            return self._binarized(s, relu)
        return self._with_values(s, value, relu, readers)

    def _own_of_an_op(self, s: SavedStorage) -> Decision | None:
        """What a covered op keeps for itself and gistkit's keeps smaller: max-pool's index, dropout's mask."""
        savers = self._graph.savers(s.id)
        call = savers[0][0]
        if len(savers) > 1 or call.covered < 0 or s.producer != call.index or s.id in call.reads:
            return None
        if call.op == "max_pool2d" and s.dtype == "int64":
            bits = map_bits(call, self.reading, self._carries_mask(call))
            if bits is not None:
                return Decision(s.id, f"argmax{bits}", reason="position in the window instead of an int64 index")
        # under p=1 PyTorch keeps one zero instead of a mask
        masked = call.op == "dropout" and (call.options or {}).get("p") != 1
        if masked and self.reading.operand(call).dtype in KERNEL_DTYPES:
            return Decision(s.id, "bits", reason="a dropout mask is 1 bit an element")
        return None

    def _carries_mask(self, pool: Call) -> bool:
        """Whether a pool's map stands for the mask of the ReLU before it."""
        decision = self.decide(self.reading.operand(pool).storage)
        return decision is not None and decision.codec == "drop" and decision.reason == CARRIED

    def _binarized(self, s: SavedStorage, relu: Call) -> Decision:
        if mask_carrier(relu, self.reading) is not None:
            return Decision(s.id, "drop", reason=CARRIED)
        return Decision(s.id, "mask1", reason="backward asks a ReLU output only for its sign")

    def _with_values(
        self, s: SavedStorage, value: Value, relu: Call | None, readers: list[tuple[Call, Save]]
    ) -> Decision:
        """The smallest of: dense, sparse, narrow, rebuilt."""
        who = f"{readers[0][0].op} reads its values"
        narrow = self._lossy if all(may_narrow(c, r) for c, r in readers) else None
        density = self.densities.of(s.id, value.version)
        best = self._smallest(s, density, narrow, relu is not None, who)
        rebuilt = None if relu is None else self._rebuilt(s, relu)
        if rebuilt is not None and self.predicted_bytes(rebuilt) < self.predicted_bytes(best):
            return rebuilt
        return best

    def _rebuilt(self, s: SavedStorage, relu: Call) -> Decision | None:
        recipe = recipe_of(relu, self.reading, self.decide) if self._rebuilds else None
        if recipe is None:
            return None
        made = Decision(
            s.id,
            "rebuild",
            place="nowhere",
            mask=True,
            sources=recipe.sources,
            recipe=recipe.steps,
            reason="follows from what batch norm keeps"
            if "add" not in str(recipe.steps)
            else "follows from the terms of the addition",
        )
        if depth(made, self.decide) > MAX_DEPTH:
            return None
        exact = not any(rounded(source, self.decide) for source in made.sources)
        return made if exact or intolerant(s.id, self.reading) is None else None

    def _smallest(
        self, s: SavedStorage, density: float | None, narrow: str | None, is_relu: bool, who: str
    ) -> Decision:
        """Dense, sparse or narrow, whichever keeps fewest bytes; exact forms win ties."""
        forms = [] if density is None else [Decision(s.id, c, reason=_sparse(who, density)) for c in ("zvc", "csr")]
        if narrow is not None:
            forms += (
                []
                if density is None
                else [
                    Decision(s.id, f"{c}+{narrow}", reason=f"{_sparse(who, density)}, the rest in {narrow}")
                    for c in ("zvc", "csr")
                ]
            )
            forms.append(Decision(s.id, narrow, mask=is_relu, reason=f"{who}: {narrow} until then"))
        best = min(forms, key=self.predicted_bytes, default=None)
        if best is not None and self.predicted_bytes(best) <= PAYS * s.nbytes:
            return best
        if best is not None and density is not None:
            return _dense(s, f"{who}, and with {density:.0%} non-zeros no encoding pays")
        refused = "" if self._lossy is None or narrow is not None else " exactly"
        return _dense(s, f"{who}{refused}, and nothing speaks for zeros in them")


CARRIED = "the pool's map carries the mask"


def _dense(s: SavedStorage, reason: str) -> Decision:
    return Decision(s.id, "dense", reason=reason)


def _sparse(who: str, density: float) -> str:
    return f"{who}, and {1 - density:.0%} of them are zeros"
