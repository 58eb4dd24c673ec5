"""Which calls of a forward run anew for a plan's ``recompute`` decisions, and which storages they start from. A segment
is all decisions with equal sources (:mod:`gistkit.planning.simulate.segments`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass

from gistkit.errors import PlanError
from gistkit.ir import FORMS, RERUN, Call, Decision, SavedGraph, by_key, rerun_of
from gistkit.planning.forms.allowed import Judge
from gistkit.planning.forms.readers import intolerant, rounded
from gistkit.planning.simulate import check_sources, valued

OUTSIDE = ("input", "parameter", "buffer")
OBSERVERS = frozenset(("untyped_storage", "device.default"))
"""Calls that do not count: those who watch operators ask tensors so."""


@dataclass(frozen=True)
class SegmentPlan:
    """``storages`` come back through ``calls``, which make the storages ``inside`` anew."""

    index: int
    storages: frozenset[int]
    inside: frozenset[int]
    calls: frozenset[int]


@dataclass(frozen=True)
class RecomputePlan:
    """All segments of a plan over one graph; ``order`` holds the calls that a function mode sees, in order, ``ops``
    theirs, empty for such as read nothing that comes of parameters."""

    graph: SavedGraph
    order: tuple[int, ...]
    ops: tuple[str, ...]
    segments: tuple[SegmentPlan, ...]
    of_call: Mapping[int, tuple[SegmentPlan, ...]]
    of_storage: Mapping[int, SegmentPlan]
    watched: frozenset[int]


def recompute_plan(graph: SavedGraph, decisions: Mapping[int, Decision]) -> RecomputePlan | None:
    """The segments of the decisions, by storage; None where nothing is recomputed. Raises PlanError, which names
    storage and call, for what cannot run anew: calls that write to what outlives them, calls that no function mode
    sees, what an op keeps for itself, sources that are overwritten or not kept."""
    groups = _groups(decisions.values())
    if not groups:
        return None
    replays = Replays(graph, decisions)
    found = tuple(replays.segment(i, wanted, sources) for i, (sources, wanted) in enumerate(groups.items()))
    of_call = by_key((call, segment) for segment in found for call in segment.calls)
    of_storage = {s: segment for segment in found for s in segment.storages}
    savers = {c.index for s in of_storage for c, _ in graph.savers(s)}
    order = tuple(c.index for c in graph.calls if not c.hidden and c.op not in OBSERVERS)
    ops = tuple("" if graph.trained.isdisjoint(graph.calls[n].reads) else graph.calls[n].op for n in order)
    made_by = {c: tuple(s) for c, s in of_call.items()}
    return RecomputePlan(graph, order, ops, found, made_by, of_storage, frozenset(of_call) | savers)


class Replays:
    """Which storages of a graph the runtime can run anew, and through which calls, under a plan's decisions.
    ``captured``: as a CUDA graph, where no random numbers can be drawn a second time."""

    def __init__(
        self, graph: SavedGraph, decisions: Mapping[int, Decision] | None = None, captured: bool = False
    ) -> None:
        self.graph, self.decisions, self._judge = graph, decisions or {}, Judge(graph)
        self._drawing = {task.call for task in graph.tasks if task.draws} if captured else ()
        self.own, self.late = self._judge.own, self._judge.late
        self._writers = by_key((s, c.index) for c in graph.calls for s in c.writes)

    def under(self, decisions: Mapping[int, Decision]) -> Replays:
        """The same graph under other decisions, by storage."""
        other = copy(self)
        other.decisions = decisions
        return other

    def able(self, decisions: Iterable[Decision]) -> list[Decision]:
        """The decisions without the segments that the runtime would refuse to run anew."""
        listed = list(decisions)
        reader = self.under({d.storage: d for d in listed})
        refused = {sources for sources, wanted in _groups(listed).items() if reader.refuses(wanted, sources)}
        return [d for d in listed if d.form.returns != RERUN or d.sources not in refused]

    def refuses(self, wanted: Iterable[int], sources: Iterable[int]) -> bool:
        try:
            self.segment(0, wanted, sources)
        except PlanError:
            return True
        return False

    def segment(self, index: int, wanted: Iterable[int], sources: Iterable[int]) -> SegmentPlan:
        """The segment of storages that come back from ``sources``. Raises PlanError as :func:`recompute_plan`."""
        wanted = frozenset(wanted)
        for storage in wanted:
            why = self._judge.why_not(storage, FORMS["recompute"])
            if why:
                raise PlanError(f"{self._name(storage)}: recompute, but {why}; leave it undecided")
        stops = set(sources)
        check_sources(self._name(min(wanted)), stops, self.decisions.get)
        found = rerun_of(
            wanted,
            self._writers,
            lambda call: self.graph.calls[call].reads,
            lambda storage: storage in stops or self._stays(storage),
        )
        calls = [self.graph.calls[i] for i in found.calls]
        for check in (self._check_call, self._check_sources):
            for call in calls:
                check(call, found.inside, min(wanted))
        self._check_rounded(calls, found.inside, wanted)
        return SegmentPlan(index, wanted, found.inside, frozenset(found.calls))

    def _stays(self, storage: int) -> bool:
        """Whether a storage is there in backward, with its values, whatever this segment does."""
        if self.graph.storages[storage].kind in OUTSIDE or not self._writers.get(storage):
            return True
        return storage in self._judge.kept and valued(storage, self.decisions.get)

    def _name(self, storage: int) -> str:
        return f"storage {storage}, shape {self.graph.storages[storage].shape}"

    def _check_call(self, call: Call, inside: frozenset[int], wanted: int) -> None:
        module = call.module or "the model"
        what = f"{self._name(wanted)}: recompute runs {call.op} of {module} (call {call.index}) anew"
        remedy = "keep what it makes, or cut the segment behind it"
        if call.hidden:
            what += ", which is no call of a torch function (a custom autograd Function, scripted code)"
            raise PlanError(f"{what}; {remedy}")
        if call.index in self._drawing:
            raise PlanError(f"{what}, which draws random numbers, within a CUDA graph; {remedy}")
        strange = (call.options or {}).get("opaque")
        if strange:
            raise PlanError(f"{what}, whose argument of type {strange} cannot be kept for that; {remedy}")
        norm = call.op == "batch_norm" and call.covered >= 0
        for storage in call.writes:
            s = self.graph.storages[storage]
            statistics = norm and s.kind == "buffer"
            if storage not in inside and not statistics and s.producer != call.index:
                kind = f"storage {storage} ({s.kind}) that outlives it"
                raise PlanError(f"{what}, which writes to {kind}, once more in backward; {remedy}")

    def _check_sources(self, call: Call, inside: frozenset[int], wanted: int) -> None:
        for read in (r for r in call.reads if r not in inside and self.graph.storages[r].kind not in OUTSIDE):
            later = next((w for w in self.graph.writers(read) if w.index > call.index), None)
            if later is not None:
                raise PlanError(
                    f"{self._name(wanted)}: recompute reads storage {read} as {call.op} (call {call.index}) found "
                    f"it, but {later.op} (call {later.index}) overwrites it; cut the segment elsewhere"
                )

    def _check_rounded(self, calls: Iterable[Call], inside: frozenset[int], wanted: frozenset[int]) -> None:
        reads = {r for call in calls for r in call.reads} - inside
        source = next((r for r in sorted(reads) if rounded(r, self.decisions.get)), None)
        for storage in sorted(wanted) if source is not None else ():
            masked = storage in self.decisions and self.decisions[storage].mask
            strict = intolerant(storage, self._judge.reading, masked)
            if strict is not None:
                raise PlanError(
                    f"{self._name(storage)}: recompute from storage {source}, which comes back rounded, but the "
                    f"backward of {strict.op} of {strict.module or 'the model'} (call {strict.index}) takes no rounded "
                    "values; keep one of the two exactly"
                )


def _groups(decisions: Iterable[Decision]) -> dict[tuple[int, ...], list[int]]:
    return by_key((d.sources, d.storage) for d in decisions if d.form.returns == RERUN)
