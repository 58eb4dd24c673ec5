"""From a graph to `optimal`'s problem, and from the moves that it takes to a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from gistkit.codecs import CODECS
from gistkit.errors import PlanError
from gistkit.ir import Block, CallChoice, Decision, Plan, Reading, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES, call_choices, options, shipped_until, slice_counts
from gistkit.planning.policies.optimal.algorithms import algorithm_moves, chosen, joined
from gistkit.planning.policies.optimal.parts import Parts, Way
from gistkit.planning.policies.optimal.problem import Key, Link, Move, Part, Problem, Tie, spread
from gistkit.planning.policies.optimal.segments import Candidate, candidates, even_plans
from gistkit.planning.simulate import Context, Profile, StepIndex, is_decoded, is_sparse

Options = Mapping[int, Sequence[Decision]]


class Build:
    """The problem of one graph (of one sub-batch, where the batch is cut) and its plans.

    ``found`` are the options by storage; ``seeds`` are plans whose decisions, algorithms and slices are offered too,
    as far as the class allows them. ``algorithms``: convolutions choose theirs. ``recompute``: segments may run anew.
    ``known``: effects that another build over the same graph and costs has looked at already, and where this one's go.
    """

    def __init__(
        self,
        graph: SavedGraph,
        costs: CostTable,
        fidelity: str,
        lossy: str | None,
        seeds: Sequence[Plan] = (),
        found: Options | None = None,
        algorithms: bool = True,
        recompute: bool = True,
        known: dict | None = None,
    ) -> None:
        self.graph, self.costs, self.fidelity, self._chooses = graph, costs, fidelity, algorithms
        self.index = StepIndex(graph)
        self._known_choices: dict[tuple[CallChoice, ...], CallChoice] = {}
        found = options(graph, costs, fidelity, lossy) if found is None else found
        self.options = _offered(found, seeds, fidelity)
        free = {s: listed[0] for s, listed in self.options.items() if listed[0].codec == "drop"}
        self.choices = call_choices(Reading(graph), free)
        self.known: dict = ({} if known is None else known).setdefault(self.choices, {})
        covered = (c for c in graph.calls if c.covered >= 0)
        self._parts_of = {
            c.covered: [graph.tasks[t].part_name for t in self.index.of_call.get(c.index, ())] for c in covered
        }
        self.frames = even_plans(graph) if recompute else ()
        self.segments = candidates(self.index, self.options, (*seeds, *self.frames)) if recompute else ()
        self._offer_early(lossy)

    def _offer_early(self, lossy: str | None) -> None:
        """What a segment starts from may come back from the host for it, before its own first use."""
        starts: dict[int, set[int]] = defaultdict(set)
        for candidate in self.segments:
            for storage in candidate.sources:
                if len(self.options.get(storage, ())) > 1:
                    starts[storage].add(candidate.segment.start)
        for storage, more in shipped_until(self.graph, self.costs, starts, lossy).items():
            self.options[storage] = tuple(dict.fromkeys((*self.options[storage], *more)))

    def offering(self, options: Mapping[int, tuple[Decision, ...]]) -> Build:
        """The same build with other options; what effects are known stays known."""
        other = copy(self)
        other.options = dict(options)
        return other

    def bare(self) -> Plan:
        """The plan that decides nothing and runs calls as every plan of this build does."""
        return Plan("optimal", self.graph.fingerprint, (), self.choices, fidelity=self.fidelity)

    def problem(self, bare: Profile, encodings: Sequence[int] | None = None) -> Problem:
        """The problem; ``bare`` is the profile of :meth:`bare`. ``encodings``: the tasks at which sparse encodings are
        taken to be made, which settle each other's scratches on CUDA. By default the least memory that any may take."""
        context = Context.of(self.bare(), self.index)
        if encodings is None:
            context = replace(context, encodings=self._encodings(), least=True)
        else:
            context = replace(context, encodings=tuple(encodings))
        parts = Parts(self.costs, self.index, context, self.known)
        blocks = {self.index.by_storage[s].id for s in self.options if s in self.index.by_storage}
        again = self._again()
        groups, ways, demands, members = [], {}, [], defaultdict(list)
        for storage in self.options:
            block = self.index.by_storage.get(storage)
            if block is None:
                continue
            number = len(groups)
            moves, taken = self._moves(parts, block)
            for s, way in again.get(storage, ()):
                members[s].append((number, len(moves)))
                moves.append(Move(parts.of(block, way), decision=way.decision))
                taken.append(way)
            ways[block.id] = [((number, m), way) for m, way in enumerate(taken)]
            demands += [parts.demands(k, block, w) for k, w in ways[block.id] if w.decision.codec == "rebuild"]
            groups.append(tuple(moves))
        ties = []
        coded = frozenset(b for b, moves in ways.items() if any(is_decoded(way.decision) for _, way in moves))
        for s, candidate in enumerate(self.segments):
            ties.append(Tie((len(groups), 1), tuple(members[s])))
            groups.append((Move(Part()), Move(parts.segment(candidate))))
            demands.append(parts.rerun(ties[-1].on, candidate, coded))
        joints, conflicts = parts.together(ways, demands)
        conflicts += _of_same_sources(self.segments, ties)
        groups += [g for g in (algorithm_moves(self.graph, self.costs, t) for t in self._convolutions()) if len(g) > 1]
        rest = ((i.first, i.last, i.nbytes) for i in bare.intervals if i.block not in blocks)
        base = spread([Part(tuple(rest))], np.zeros(bare.tasks, dtype=np.int64))
        seconds = np.array(bare.task_s) + np.array(bare.extra_s)
        return Problem(base, seconds, tuple(groups), tuple(joints), tuple(conflicts), self._link(), tuple(ties))

    def _encodings(self) -> tuple[int, ...]:
        """The tasks at which any sparse encoding may be made, once for each storage that may be encoded."""
        offered = (s for s, listed in self.options.items() if any(is_sparse(d.codec) for d in listed))
        saved = (self.index.by_storage[s].saved for s in offered if s in self.index.by_storage)
        return tuple(sorted(t for t in saved if t >= 0))

    def _link(self) -> Link:
        rates = self.costs.hardware
        alone = rates.d2h_gbps + rates.h2d_gbps
        shared = min(1.0, rates.both_gbps / alone) if alone else 1.0
        return Link(rates.d2h_gbps, rates.h2d_gbps, rates.launch_s, shared)

    def _again(self) -> dict[int, list[tuple[int, Way]]]:
        """By storage the segments that it may come back with."""
        found = defaultdict(list)
        for s, candidate in enumerate(self.segments):
            for storage in candidate.storages:
                way = Way(candidate.decision(storage), restart=candidate.segment.start)
                found[storage].append((s, way))
        return found

    def _moves(self, parts: Parts, block: Block) -> tuple[list[Move], list[Way]]:
        moves, ways = [], []
        for decision in self.options[block.storage]:
            for count in self._cuts(block, decision):
                way = Way(decision, tuple((t, count) for t in self._weight_tasks(block)) if count > 1 else ())
                try:
                    part = parts.of(block, way)
                except PlanError:
                    continue  # a seed's decision that leans on its own policy's way of running
                moves.append(Move(part, decision=decision, slices=count))
                ways.append(way)
        if not moves:
            way = Way(Decision(block.storage, "dense", reason="kept: nothing else is allowed"))
            moves, ways = [Move(parts.of(block, way), decision=way.decision)], [way]
        return moves, ways

    def _cuts(self, block: Block, decision: Decision) -> tuple[int, ...]:
        """Slices that make a difference: what is kept as it is cannot be decoded in parts."""
        if decision.codec in ("dense", "drop", "mask1", "bits", "argmax4", "argmax8"):
            return (1,)
        allowed = slice_counts(self.fidelity, len(self.options))
        return tuple(n for n in allowed if n == 1 or n <= self.graph.batch) if self._weight_tasks(block) else (1,)

    def _weight_tasks(self, block: Block) -> list[int]:
        return [u.task for u in block.uses if u.values and self._may_be_cut(u.task)]

    def _may_be_cut(self, task: int) -> bool:
        found = self.graph.tasks[task]
        return found.part == "weight" and self.graph.calls[found.call].covered >= 0

    def _convolutions(self) -> list[int]:
        """Tasks that choose an algorithm."""
        calls = (c.index for c in self.graph.calls if self._chooses and c.covered >= 0 and c.op == "conv2d")
        return [t for c in calls for t in self.index.of_call[c]]

    def plan(self, problem: Problem, taken: Sequence[int]) -> Plan:
        """The plan of the moves taken, without its figures."""
        moves = [problem.groups[g][m] for g, m in enumerate(taken)]
        decisions = tuple(m.decision for m in moves if m.decision is not None)
        told = defaultdict(list)
        for choice in (*self.choices, *(m.choice for m in moves if m.choice is not None), *self._sliced(moves)):
            told[choice.covered].append(choice)
        ordered = tuple(self._merged(tuple(told[c])) for c in sorted(told))
        return Plan("optimal", self.graph.fingerprint, decisions, ordered, fidelity=self._class(moves))

    def _merged(self, told: tuple[CallChoice, ...]) -> CallChoice:
        """What several moves choose for one call, in one; remembered, as every plan asks for it."""
        if len(told) == 1:
            return told[0]
        if told not in self._known_choices:
            algorithm = joined((c.algorithm for c in told), self._parts_of[told[0].covered])
            slices = max(c.weight_grad_slices for c in told)
            self._known_choices[told] = replace(told[0], weight_grad_slices=slices, algorithm=algorithm)
        return self._known_choices[told]

    def _sliced(self, moves: Iterable[Move]) -> Iterable[CallChoice]:
        for move in moves:
            if move.slices > 1 and move.decision is not None:
                for task in self._weight_tasks(self.index.by_storage[move.decision.storage]):
                    call = self.graph.calls[self.graph.tasks[task].call]
                    yield CallChoice(call.covered, call.op, weight_grad_slices=move.slices)

    def _class(self, moves: Iterable[Move]) -> str:
        """The class of the moves really used."""
        classes = {_class_of(m.decision.codec if m.decision else "", m.slices) for m in moves}
        return max(classes, key=FIDELITIES.index, default="bitwise")

    def seed(self, problem: Problem, plan: Plan) -> tuple[int, ...]:
        """The moves nearest to another policy's plan: the same decision, else the group's first."""
        decided = {d.storage: _bare(d) for d in plan.decisions}
        algorithms = {c.covered: c.algorithm for c in plan.choices if c.algorithm}
        taken = []
        for group in problem.groups:
            first = group[0].decision
            if first is not None:
                if decided.get(first.storage, first).codec == "recompute":
                    decided.pop(first.storage)  # with its whole segment or not at all: see below
                wanted = decided.get(first.storage, Decision(first.storage, "dense"))
                match = (m for m, move in enumerate(group) if move.decision and _bare(move.decision) == wanted)
                taken.append(next(match, 0))
            else:
                taken.append(chosen(group, algorithms))
        return self._with_segments(problem, taken, plan)

    def _with_segments(self, problem: Problem, taken: list[int], plan: Plan) -> tuple[int, ...]:
        """The segments of a plan turned on of which all storages that may come back are the candidate's."""
        returned: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for decision in plan.decisions:
            if decision.codec == "recompute":
                returned[decision.sources].add(decision.storage)
        able = {s for c in self.segments for s in c.storages}
        for candidate, tie in zip(self.segments, problem.ties, strict=True):
            if returned.get(candidate.sources, set()) & able == set(candidate.storages):
                for group, move in (tie.on, *tie.members):
                    taken[group] = move
        return tuple(taken)


def encodings_of(problem: Problem, taken: Sequence[int], index: StepIndex) -> tuple[int, ...]:
    """The tasks at which a choice makes sparse encodings."""
    chosen = (problem.groups[g][m].decision for g, m in enumerate(taken))
    return tuple(sorted(index.by_storage[d.storage].saved for d in chosen if d and d.codec.startswith(("zvc", "csr"))))


def _of_same_sources(found: Sequence[Candidate], ties: Sequence[Tie]) -> list[tuple[Key, ...]]:
    """Two segments from the same sources would be one to the plan."""
    by_sources: dict[tuple[int, ...], list[Key]] = defaultdict(list)
    for candidate, tie in zip(found, ties, strict=True):
        by_sources[candidate.sources].append(tie.on)
    return [pair for keys in by_sources.values() for pair in combinations(keys, 2)]


def _bare(decision: Decision) -> Decision:
    return replace(decision, reason="")


@cache
def _class_of(codec: str, slices: int) -> str:
    if codec in CODECS and CODECS[codec].error_bound is not None:
        return "lossy"
    return "reassociated" if slices > 1 else "bitwise"


def _lossy(decision: Decision) -> bool:
    return _class_of(decision.codec, 1) == "lossy"


def _offered(found: Options, seeds: Sequence[Plan], fidelity: str) -> dict[int, tuple[Decision, ...]]:
    """The options and what the seeds do beyond them."""
    offered = {s: {_bare(d): d for d in listed} for s, listed in found.items()}
    for decision in (d for plan in seeds for d in plan.decisions):
        allowed = decision.codec != "recompute" and (fidelity == "lossy" or not _lossy(decision))
        if allowed and len(found.get(decision.storage, ())) > 1:
            offered[decision.storage].setdefault(_bare(decision), decision)
    return {s: tuple(listed.values()) for s, listed in offered.items()}


__all__ = ["Build", "Key", "encodings_of"]
