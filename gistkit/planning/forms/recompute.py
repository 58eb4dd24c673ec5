"""What a plan's ``recompute`` decisions ask of a forward: which calls to write down, which storages to hold for them.

A segment is all decisions with equal sources, as in :mod:`gistkit.planning.simulate.segments`. Its calls are those
that make its
storages, and what these are made of, back to storages that are kept with their values, inputs, parameters and buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass

from gistkit.errors import PlanError
from gistkit.ir import Call, CallChoice, Decision, Reading, SavedGraph, SavedStorage, written_late
from gistkit.planning.cost import switches
from gistkit.planning.forms.lossy import intolerant, rounded
from gistkit.planning.forms.predicted import kept_by_ops
from gistkit.planning.simulate import valued

OUTSIDE = ("input", "parameter", "buffer")
OBSERVERS = frozenset(("untyped_storage", "device.default"))
"""Calls that do not count: those who watch operators ask tensors so."""


@dataclass(frozen=True)
class SegmentPlan:
    """``storages`` come back through ``calls``, which make the storages ``inside`` anew; ``end`` is the last call that
    makes or saves one of ``storages``."""

    index: int
    storages: frozenset[int]
    inside: frozenset[int]
    calls: frozenset[int]
    end: int


@dataclass(frozen=True)
class RecomputePlan:
    """All segments of a plan over one graph; ``order`` holds the calls that a function mode sees, in order;
    ``switches`` the names of the switches that convolutions are told to run forward under, by call."""

    graph: SavedGraph
    order: tuple[int, ...]
    segments: tuple[SegmentPlan, ...]
    of_call: Mapping[int, tuple[SegmentPlan, ...]]
    of_storage: Mapping[int, SegmentPlan]
    watched: frozenset[int]
    switches: Mapping[int, str]


def recompute_plan(
    graph: SavedGraph, decisions: Mapping[int, Decision], choices: Iterable[CallChoice] = ()
) -> RecomputePlan | None:
    """The segments of the decisions, by storage; None where nothing is recomputed. ``choices`` are those of the plan.

    Raises PlanError, which names storage and call, for what cannot be run anew: calls that write to what outlives them,
    calls that no function mode sees, what an op keeps for itself, sources that are overwritten or not kept.
    """
    groups = _groups(decisions.values())
    if not groups:
        return None
    reader = Replays(graph, decisions)
    found = tuple(reader.segment(i, wanted, sources) for i, (sources, wanted) in enumerate(groups.items()))
    of_call: dict[int, list[SegmentPlan]] = defaultdict(list)
    for segment in found:
        for call in segment.calls:
            of_call[call].append(segment)
    of_storage = {s: segment for segment in found for s in segment.storages}
    savers = {c.index for s in of_storage for c, _ in graph.savers(s)}
    order = tuple(c.index for c in graph.calls if not c.hidden and c.op not in OBSERVERS)
    told = {choice.covered: switches(choice.algorithm, "forward") for choice in choices}
    return RecomputePlan(
        graph,
        order,
        found,
        {c: tuple(s) for c, s in of_call.items()},
        of_storage,
        frozenset(of_call) | savers,
        {c.index: told[c.covered] for c in graph.calls if told.get(c.covered)},
    )


class Replays:
    """Which storages of a graph the runtime can run anew, and through which calls, under a plan's decisions."""

    def __init__(self, graph: SavedGraph, decisions: Mapping[int, Decision] | None = None) -> None:
        self.graph, self.decisions = graph, decisions or {}
        self.writers: dict[int, list[Call]] = defaultdict(list)
        for call in graph.calls:
            for storage in call.writes:
                self.writers[storage].append(call)
        self.saved = {s.id for s in graph.kept()}
        self.own, self.late = kept_by_ops(graph), written_late(graph)
        self._reading = Reading(graph)

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
        return [d for d in listed if d.codec != "recompute" or d.sources not in refused]

    def refuses(self, wanted: set[int], sources: Iterable[int]) -> bool:
        """Whether :meth:`segment` raises."""
        try:
            self.segment(0, wanted, sources)
        except PlanError:
            return True
        return False

    def segment(self, index: int, wanted: set[int], sources: Iterable[int]) -> SegmentPlan:
        """The segment of storages that come back from ``sources``. Raises PlanError as :func:`recompute_plan`."""
        for storage in wanted:
            self._check_wanted(storage)
        stops = set(sources)
        for source in stops:
            if not valued(source, self.decisions.get):
                codec = self.decisions[source].codec
                raise PlanError(
                    f"storage {min(wanted)}: recompute from storage {source}, which {codec!r} does not keep with its "
                    "values; keep the source"
                )
        inside, calls = self._closure(wanted, stops)
        for call in calls.values():
            self._check_call(call, inside, min(wanted))
        self._check_sources(calls, inside, min(wanted))
        self._check_rounded(calls, inside, wanted)
        savers = (c.index for s in wanted for c, _ in self.graph.savers(s))
        return SegmentPlan(index, frozenset(wanted), frozenset(inside), frozenset(calls), max((*savers, *calls)))

    def _closure(self, wanted: set[int], stops: set[int]) -> tuple[set[int], dict[int, Call]]:
        inside, work, calls = set(wanted), list(wanted), {}
        while work:
            storage = work.pop()
            for call in self.writers[storage]:
                calls[call.index] = call
                for read in call.reads:
                    if read in inside or read in stops or self._stays(read):
                        continue
                    inside.add(read)
                    work.append(read)
        return inside, calls

    def _stays(self, storage: int) -> bool:
        """Whether a storage is there in backward, with its values, whatever this segment does."""
        if self.graph.storages[storage].kind in OUTSIDE or not self.writers[storage]:
            return True
        return storage in self.saved and valued(storage, self.decisions.get)

    def _name(self, storage: int) -> str:
        return f"storage {storage}, shape {self.graph.storages[storage].shape}"

    def _check_wanted(self, storage: int) -> None:
        known = self.graph.storages[storage]
        if known.kind != "activation" or not self.writers[storage]:
            raise PlanError(f"{self._name(storage)}: recompute, but no call of the forward makes it; keep it")
        if storage in self.late:
            raise PlanError(
                f"{self._name(storage)}: recompute, but it is written only after it is saved; leave it undecided"
            )
        if storage in self.own:
            maker = self.graph.calls[known.producer]
            raise PlanError(
                f"{self._name(storage)}: recompute, but {maker.op} of {maker.module or 'the model'} keeps it for "
                "itself; leave it undecided"
            )
        if self._saved_copy(known):
            maker = self.graph.calls[known.producer]
            raise PlanError(
                f"{self._name(storage)}: recompute, but it is the copy that {maker.op} of {maker.module or 'the model'}"
                ", in place, saves of what it overwrites; leave it undecided"
            )

    def _saved_copy(self, made: SavedStorage) -> bool:
        """Whether a call in place made it inside, of its operand: no result, and not there when the call runs anew."""
        maker = self.graph.calls[made.producer] if made.producer >= 0 else None
        results = {self.graph.values[v].storage for v in maker.results} if maker is not None else set()
        return maker is not None and maker.inplace and made.id not in results

    def _check_call(self, call: Call, inside: set[int], wanted: int) -> None:
        module = call.module or "the model"
        what = f"{self._name(wanted)}: recompute runs {call.op} of {module} (call {call.index}) anew"
        if call.hidden:
            raise PlanError(
                f"{what}, which is no call of a torch function (a custom autograd Function, scripted code); keep what "
                "it makes, or cut the segment behind it"
            )
        strange = (call.options or {}).get("opaque")
        if strange:
            raise PlanError(
                f"{what}, whose argument of type {strange} cannot be kept for that; keep what it makes, or cut the "
                "segment behind it"
            )
        statistics = {s for s in call.writes if self.graph.storages[s].kind == "buffer"} if _is_norm(call) else set()
        beyond = [s for s in call.writes if s not in inside and s not in statistics and self._outlives(s, call)]
        if beyond:
            kind = self.graph.storages[beyond[0]].kind
            raise PlanError(
                f"{what}, which writes to storage {beyond[0]} ({kind}) that outlives it, once more in backward; keep "
                "what it makes, or cut the segment behind it"
            )

    def _outlives(self, storage: int, call: Call) -> bool:
        """Not what the call makes for itself alone: masks, maps, statistics."""
        return self.graph.storages[storage].producer != call.index

    def _check_sources(self, calls: Mapping[int, Call], inside: set[int], wanted: int) -> None:
        for call in calls.values():
            for read in call.reads:
                if read in inside or self.graph.storages[read].kind in OUTSIDE:
                    continue
                later = next((w for w in self.writers[read] if w.index > call.index), None)
                if later is not None:
                    raise PlanError(
                        f"{self._name(wanted)}: recompute reads storage {read} as {call.op} (call {call.index}) found "
                        f"it, but {later.op} (call {later.index}) overwrites it; cut the segment elsewhere"
                    )

    def _check_rounded(self, calls: Mapping[int, Call], inside: set[int], wanted: set[int]) -> None:
        reads = {r for call in calls.values() for r in call.reads} - inside
        source = next((r for r in sorted(reads) if rounded(r, self.decisions.get)), None)
        for storage in sorted(wanted) if source is not None else ():
            masked = storage in self.decisions and self.decisions[storage].mask
            strict = intolerant(storage, self._reading, masked)
            if strict is not None:
                raise PlanError(
                    f"{self._name(storage)}: recompute from storage {source}, which comes back rounded, but the "
                    f"backward of {strict.op} of {strict.module or 'the model'} (call {strict.index}) takes no rounded "
                    "values; keep one of the two exactly"
                )


def _groups(decisions: Iterable[Decision]) -> dict[tuple[int, ...], set[int]]:
    """The storages of every segment, by its sources."""
    groups: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for decision in decisions:
        if decision.codec == "recompute":
            groups[decision.sources].add(decision.storage)
    return groups


def _is_norm(call: Call) -> bool:
    return call.op == "batch_norm" and call.covered >= 0


__all__ = ["RecomputePlan", "Replays", "SegmentPlan", "recompute_plan"]
