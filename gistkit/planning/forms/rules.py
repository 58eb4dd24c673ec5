"""The rules of the Gist policy, one storage at a time; the table is in :mod:`gistkit.planning.policies.gist_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gistkit.formats import LOSSY_FORMS
from gistkit.ir import FORMS, Decision, SavedGraph, SavedStorage, Uses, Value
from gistkit.planning.cost import Densities
from gistkit.planning.forms.allowed import Judge, rebuilt
from gistkit.planning.forms.readers import intolerant, rounded
from gistkit.planning.forms.rebuild import MAX_DEPTH, depth

SPARSE = ("zvc", "csr")
PAYS = 0.95
"""An encoding has to save a twentieth of the dense bytes to be worth its two passes."""


def encodings(sparse: tuple[str, ...], narrow: str | None) -> tuple[str, ...]:
    """The forms from which values are decoded, exact ones first: sparse ones, and what ``narrow`` makes of all; there
    are no sparse integers."""
    both = [f"{name}+{narrow}" for name in sparse]
    return sparse if narrow is None else (*sparse, *(name for name in both if name in FORMS), narrow)


def check_lossy(lossy: str | None) -> None:
    """Raises ValueError where ``lossy`` is neither None nor a known format."""
    if lossy is not None and lossy not in LOSSY_FORMS:
        shown = f'"{lossy}"' if isinstance(lossy, str) else lossy
        raise ValueError(
            f"lossy must be None or one of {', '.join(LOSSY_FORMS)}; got lossy={shown}: the number is the bits of a "
            "value, s means a scale for every 128 elements, of integers 256"
        )


class Planner:
    """Decides every kept storage of one graph, each once: the smallest of the forms that the judge allows."""

    def __init__(
        self, graph: SavedGraph, lossy: str | None, densities: Mapping[int, float] | None, *, rebuild: bool = True
    ) -> None:
        self._judge = Judge(graph)
        self.reading = self._judge.reading
        self.densities = Densities(self.reading, densities)
        self._graph = graph
        self._lossy = lossy
        self._rebuilds = rebuild
        self._decided: dict[int, Decision] = {}

    def decide(self, storage: int) -> Decision | None:
        """The decision for a storage, None where plain PyTorch does not keep it either."""
        if storage not in self._judge.kept:
            return None
        if storage not in self._decided:
            self._decided[storage] = self._decision(self._graph.storages[storage])
        return self._decided[storage]

    def predicted_bytes(self, decision: Decision) -> int:
        storage = self._graph.storages[decision.storage]
        saved = self.reading.saved(storage.id)
        density = None if saved is None else self.densities.of(storage.id, saved.version)
        return decision.kept_bytes(storage.nbytes, storage.dtype, density)

    def _decision(self, s: SavedStorage) -> Decision:
        uses = self.reading.uses(s.id)
        found = None if s.kind == "input" or s.id in self._judge.late else self._judge.own_map(s.id)
        found = found or self._judge.without_values(s.id)
        if found is not None:
            return found
        why = self._judge.why_dense(s.id)
        if why or uses.value is None:
            return Decision(s.id, "dense", reason=why)
        return self._with_values(s, uses, uses.value)

    def _with_values(self, s: SavedStorage, uses: Uses, value: Value) -> Decision:
        """The smallest of: dense, sparse, narrow, rebuilt; exact forms win ties."""
        who = f"{uses.readers[0][0].op} reads its values"
        density = self.densities.of(s.id, value.version)
        names = encodings(() if density is None else SPARSE, self._lossy)
        forms = self._judge.allowed(s.id, names)
        best = min(forms, key=self.predicted_bytes, default=None)
        if best is None or self.predicted_bytes(best) > PAYS * s.nbytes:
            best = Decision(s.id, "dense", reason=f"{who}{self._why_none_pays(density, forms)}")
        else:
            best = _with_reason(best, who, density)
        again = self._rebuilt(s.id) if self._rebuilds else None
        return again if again and self.predicted_bytes(again) < self.predicted_bytes(best) else best

    def _why_none_pays(self, density: float | None, forms: tuple[Decision, ...]) -> str:
        if density is not None:
            return f", and with {density:.0%} non-zeros no encoding pays"
        exactly = " exactly" if self._lossy is not None and not forms else ""
        return f"{exactly}, and nothing speaks for zeros in them"

    def _rebuilt(self, storage: int) -> Decision | None:
        recipe = self._judge.recipe(storage, self.decide)
        found = None if recipe is None else rebuilt(storage, recipe)
        if found is None or depth(found, self.decide) > MAX_DEPTH:
            return None
        exact = not any(rounded(source, self.decide) for source in found.sources)
        return found if exact or intolerant(storage, self.reading) is None else None


def _with_reason(found: Decision, who: str, density: float | None) -> Decision:
    narrow, zeros = found.form.rounds_to, "" if density is None else f"{1 - density:.0%} of them are zeros"
    rest = f", the rest in {narrow}" if narrow else ""
    return replace(found, reason=f"{who}, and {zeros}{rest}" if found.form.sparse else f"{who}: {narrow} until then")
