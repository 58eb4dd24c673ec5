"""Whether every decision of a plan is one that its storage can have, in the step that is about to run.

Policies choose among what a storage allows (:mod:`gistkit.planning.forms.options`); a file that somebody has edited may
say anything. What it says is judged before anything runs, by what the policies know of the graph: who reads values in
backward and whether these may be rounded, what an op keeps for itself, what a rebuild starts from. Segments that run
anew are judged by :mod:`gistkit.planning.forms.recompute`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gistkit.codecs import CODECS, VALUE_FORMS, dtype_of
from gistkit.errors import PlanError
from gistkit.ir import REMEDY, Call, Decision, Plan, Reading, Save, SavedGraph, SavedStorage, written_late
from gistkit.planning.forms.lossy import intolerant, may_narrow, rounded
from gistkit.planning.forms.predicted import kept_by_ops
from gistkit.planning.forms.rebuild import recipe_of
from gistkit.planning.simulate import NO_VALUES

OWN = ("argmax4", "argmax8", "bits", "dense")
"""Forms of what an op makes and keeps for itself."""
NOWHERE = ("rebuild", "recompute", "drop")
"""Codecs without a payload."""


def check_decisions(plan: Plan, graph: SavedGraph) -> None:
    """Raise PlanError naming the first decision of a plan that its storage in the captured forward cannot have."""
    judge = _Judge(plan, graph)
    for decision in plan.decisions:
        why = judge.wrong(decision)
        if why:
            s = graph.storages[decision.storage]
            maker = "an input" if s.producer < 0 else f"{graph.calls[s.producer].op}, shape {s.shape}"
            raise PlanError(
                f"compress: plan is damaged: storage {s.id} ({maker}) cannot be {decision.codec!r} with place "
                f"{decision.place!r}: {why}; {REMEDY}"
            )


class _Judge:
    def __init__(self, plan: Plan, graph: SavedGraph) -> None:
        self._graph, self._reading = graph, Reading(graph)
        self._decided: Mapping[int, Decision] = {d.storage: d for d in plan.decisions}
        self._own, self._late = kept_by_ops(graph), written_late(graph)

    def wrong(self, d: Decision) -> str:
        """Why a decision cannot be; '' where it can."""
        s = self._graph.storages[d.storage]
        if d.codec == "dense" and d.place == "device":
            return ""
        if s.kind not in ("input", "activation"):
            return f"it is a {s.kind}, which stays as it is"
        if s.id in self._late:
            return "it is written only after it is saved"
        if d.place == ("host" if d.codec in NOWHERE else "nowhere"):
            return "what has no payload is in no place" if d.codec in NOWHERE else "its payload must be somewhere"
        if s.id in self._own:
            return "" if d.codec in OWN else "its op keeps it for itself in a form of its own"
        return self._transfer(d) or self._form(s, d)

    def _transfer(self, d: Decision) -> str:
        if min(d.offload, d.release, d.prefetch, d.ready) < -1:
            return "a task has a number from 0 on, -1 for none"
        points = [t for t in (d.offload, d.release, d.prefetch, d.ready) if t >= 0]
        if d.place == "host" and points != sorted(points):
            return f"it must leave before it comes back, and offload, release, prefetch, ready are tasks {points}"
        return ""

    def _form(self, s: SavedStorage, d: Decision) -> str:
        value = self._reading.saved(s.id)
        relu = None if value is None else self._reading.relu_behind(value)
        readers = self._reading.value_readers(s.id, relu)
        if d.codec in NO_VALUES and readers:
            return f"the backward of {readers[0][0].op} (call {readers[0][0].index}) needs its values"
        if d.codec.startswith("argmax"):
            return "only a max-pool makes such a map, for itself"
        if d.codec == "mask1" and relu is None:
            return "it is no ReLU's output"
        if d.codec == "rebuild":
            return self._rebuild(d)
        return self._coded(s, d, relu is not None, readers) if d.codec in CODECS else ""

    def _coded(self, s: SavedStorage, d: Decision, is_relu: bool, readers: list[tuple[Call, Save]]) -> str:
        codec = CODECS[d.codec]
        if codec.dtypes is not None and dtype_of(s.dtype) not in codec.dtypes:
            return f"its dtype is {s.dtype}"
        if not codec.lossless:
            strict = next((call for call, save in readers if not may_narrow(call, save)), None)
            if strict is not None:
                return f"the backward of {strict.op} (call {strict.index}) takes no rounded values"
        if is_relu and d.codec in VALUE_FORMS and not d.mask:  # sparse forms tell by what is stored
            return "the ReLU that made it needs a mask beside rounded values"
        return ""

    def _rebuild(self, d: Decision) -> str:
        value = self._reading.saved(d.storage)
        relu = None if value is None else self._reading.relu_behind(value)
        recipe = None if relu is None else recipe_of(relu, self._reading, self._valued)
        if recipe is None:
            return "it does not follow from what batch norms and additions read and what is kept with its values"
        if (recipe.steps, recipe.sources) != (d.recipe, d.sources):
            return f"it comes about as {recipe.steps} from storages {recipe.sources}"
        if self._circle(d.storage, ()):
            return "it would be rebuilt from itself"
        strict = intolerant(d.storage, self._reading, d.mask) if rounded(d.storage, self._decided.get) else None
        if strict is None:
            return ""
        return f"the backward of {strict.op} (call {strict.index}) takes no rounded values, and what it follows from is"

    def _valued(self, storage: int) -> Decision | None:
        """A source's decision, where its values are there in backward."""
        found = self._decided.get(storage, Decision(storage, "dense"))
        return None if found.codec in NO_VALUES else found

    def _circle(self, storage: int, above: tuple[int, ...]) -> bool:
        d = self._decided.get(storage)
        if d is None or d.codec != "rebuild":
            return False
        return storage in above or any(self._circle(s, (*above, storage)) for s in d.sources)


__all__ = ["NOWHERE", "check_decisions"]
