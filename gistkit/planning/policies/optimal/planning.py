"""One call of `optimal`: its numbers of sub-batches, each in rounds of program, simulator and new moments to ship."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.policies.optimal.attempt import Attempt
from gistkit.planning.policies.optimal.build import Options
from gistkit.planning.policies.optimal.improve import improve
from gistkit.planning.policies.optimal.peak import Least, least_peak
from gistkit.planning.policies.optimal.reasons import reasoned
from gistkit.planning.policies.optimal.refine import WHOLE_SIZE, Outcome, Refinement
from gistkit.planning.policies.optimal.whole import Allowed, fastest_whole, offered
from gistkit.planning.simulate import Simulator, trains_batch_norm

ENOUGH = 1e-4
"""A gap, or what another round gains, that is worth no more time: relative to the step."""
SEARCH_SHARE = 0.3
"""Share of the time that a search gets at least, however long it took to get there."""
WORTH, MORE_SHARE, MORE_S = 0.1, 0.5, 2.0
"""With a gap above WORTH the search goes on from the best plan for so much of its time again, at most MORE_S seconds:
at the least budgets 4 s are too short for most steps (ResNet-50 on an H200: 74.4 -> 68.1 ms; on a Titan X 778 -> 757).
"""
PEAK_SHARE = 0.2
"""Share of the time for the least peak, which every plan reports."""


@dataclass(frozen=True)
class Settings:
    """What the caller allows: class of moves, narrow format, sub-batches under batch norm, reserve, seconds, choice of
    algorithms, segments that run anew."""

    fidelity: str
    lossy: str | None
    batch_norm: bool
    reserve: int
    time_limit_s: float
    algorithms: bool
    recompute: bool = True

    @property
    def allowed(self) -> Allowed:
        """The class of moves, for whole plans."""
        return Allowed(self.fidelity, self.batch_norm, self.algorithms, self.recompute)


@dataclass(frozen=True)
class Common:
    """What several searches over one step share: the simulator, and the effects that are known so far, by number of
    sub-batches."""

    simulator: Simulator
    effects: dict[int, dict] = field(default_factory=lambda: defaultdict(dict))


def part_counts(graph: SavedGraph, settings: Settings, seeds: Iterable[Plan] = ()) -> list[int]:
    """Numbers of sub-batches to look at: 1, powers of two up to the most, those of the seeds, the most (the batch, if
    single rows go the same way)."""
    most = graph.most_parts
    if settings.fidelity == "bitwise" or most < 2 or (trains_batch_norm(graph) and not settings.batch_norm):
        return [1]
    powers = {2**i for i in range(most.bit_length()) if 2**i <= most}
    return sorted(powers | {most} | {s.sub_batches for s in seeds if 1 <= s.sub_batches <= most})


class Planning:
    """One call of `optimal`: attempts by number of sub-batches, made when they are first looked at."""

    def __init__(
        self,
        graph: SavedGraph,
        costs: CostTable,
        settings: Settings,
        seeds: Sequence[Plan],
        options: Options | None,
        room_bytes: int | None,
        common: Common,
    ) -> None:
        self._graph, self._costs, self._settings = graph, costs, settings
        self._options = options
        self._begun = time.monotonic()
        self._common = common
        self._seeds = offered(seeds, common.simulator, room_bytes)
        self._counts = part_counts(graph, settings, self._seeds)
        self._attempts: dict[int, Attempt] = {}
        self._least: dict[int, Least] = {}
        self._fewest = 1

    def run(self, budget_bytes: int | None) -> tuple[tuple[Attempt, Outcome, float] | None, Least]:
        """The best attempt with its outcome and the bound over all numbers of sub-batches (seconds); least peak."""
        limit = self._settings.time_limit_s
        least = self.least(self._begun + PEAK_SHARE * limit, budget_bytes)
        deadline = self._begun + limit
        best: tuple[Attempt, Outcome] | None = None
        bound_s = np.inf
        for parts in self._counts:
            attempt = self._attempt(parts)
            if self._least[parts].rules_out(budget_bytes):
                continue
            floor = parts * attempt.problem.floor_s
            if best is not None and floor >= best[0].parts * best[1].seconds:
                bound_s = min(bound_s, floor)
                continue
            share = 1.0 if parts == self._counts[-1] else 0.6
            left = SEARCH_SHARE if best is None else 0.02
            until = time.monotonic() + share * max(deadline - time.monotonic(), left * limit)
            attempt, outcome = _search(attempt, budget_bytes, until, self._least[parts], self._options is not None)
            bound_s = min(bound_s, parts * outcome.bound_s)
            if outcome.taken is not None and (
                best is None or parts * outcome.seconds < best[0].parts * best[1].seconds
            ):
                best = (attempt, outcome)
        if best is None:
            return None, least
        attempt, outcome = best
        if attempt.parts * outcome.seconds * (1 - WORTH) > bound_s and outcome.taken is not None:
            until = time.monotonic() + min(MORE_SHARE * limit, MORE_S)
            taken, seconds = improve(attempt.search, [(outcome.taken, outcome.seconds)], budget_bytes, until)
            outcome = replace(outcome, taken=taken, seconds=seconds)
        return (attempt, outcome, bound_s), least

    @property
    def floor_s(self) -> float:
        """Seconds that every plan takes, by the sum of what is fastest: below any plan, whoever made it."""
        return min(parts * attempt.problem.floor_s for parts, attempt in self._attempts.items())

    def least(self, deadline: float, room_bytes: int | None = 0) -> Least:
        """The least peak over all numbers of sub-batches. For a large problem no more than what fits into
        ``room_bytes`` (None: anything does)."""
        for parts in self._counts:
            attempt = self._attempt(parts)
            left = max(deadline - time.monotonic(), 0.1 * self._settings.time_limit_s)
            self._least[parts] = least_peak(attempt, left, room_bytes, quick=attempt.problem.size > WHOLE_SIZE)
        self._fewest = min(self._least, key=lambda parts: self._least[parts].peak_bytes)
        bound = min(one.bound_bytes for one in self._least.values())
        return replace(self._least[self._fewest], bound_bytes=bound)

    def smallest(self) -> Plan:
        """The plan of what :meth:`least` found, without its figures."""
        return reasoned(self._attempts[self._fewest], self._least[self._fewest].taken)

    def seconds(self, plan: Plan) -> float:
        """Seconds of a plan, by simulation."""
        return self._common.simulator.run(plan).step_s

    def whole(self, seeds: Sequence[Plan], room_bytes: int | None) -> Plan | None:
        """The fastest of other policies' plans that fits and is of the class."""
        return fastest_whole(seeds, self._graph, self._common.simulator, self._settings.allowed, room_bytes)

    def _attempt(self, parts: int) -> Attempt:
        if parts not in self._attempts:
            s = self._settings
            self._attempts[parts] = Attempt(
                self._graph, self._costs, self._common.simulator, s.fidelity, s.lossy,
                parts=parts, seeds=self._seeds, found=self._options, algorithms=s.algorithms,
                recompute=s.recompute, known=self._common.effects[parts],
            )  # fmt: skip
        return self._attempts[parts]


def _search(
    attempt: Attempt, budget_bytes: int | None, deadline: float, least: Least, restricted: bool
) -> tuple[Attempt, Outcome]:
    """The fastest choice of one number of sub-batches, and the attempt that it is of: the one given, or where the
    options are not ``restricted`` one with better moments for what is shipped."""
    large = not restricted and attempt.problem.size > WHOLE_SIZE
    first = time.monotonic() + (deadline - time.monotonic()) * (0.5 if large else 1.0)
    outcome = _round(attempt, budget_bytes, first, [*attempt.seeds(), least.taken])
    while outcome.taken is not None and not restricted and outcome.gap > ENOUGH and time.monotonic() < deadline:
        further = attempt.retimed(outcome.taken)
        if further is None:
            # nothing is shipped: what time is left is the search's
            again = improve(attempt.search, [(outcome.taken, outcome.seconds)], budget_bytes, deadline)
            outcome = replace(outcome, taken=again[0], seconds=again[1])
            break
        found = _round(further[0], budget_bytes, deadline, [further[1]])
        if found.taken is None or found.seconds >= outcome.seconds * (1 - ENOUGH):
            # without a bound over the further options they are none: nothing is taken of them
            outcome = replace(outcome, bound_s=min(outcome.bound_s, found.bound_s)) if found.bounded else outcome
            break
        attempt, outcome = further[0], found
    return attempt, outcome


def _round(attempt: Attempt, budget_bytes: int | None, deadline: float, seeds: Sequence[Sequence[int]]) -> Outcome:
    """The fastest choice of one attempt."""
    late = attempt.counts_late and budget_bytes is not None and attempt.problem.size <= WHOLE_SIZE
    first_deadline = time.monotonic() + (deadline - time.monotonic()) * (0.6 if late else 1.0)
    outcome = Refinement(attempt.problem, attempt.search, budget_bytes, first_deadline).run(seeds, attempt.frames())
    while late and outcome.taken is not None and time.monotonic() < deadline:
        again = attempt.again(outcome.taken)
        found = Refinement(again.problem, again, budget_bytes, deadline, prove=False).run([outcome.taken], ())
        if found.taken is None or found.seconds >= outcome.seconds:
            break
        outcome = replace(outcome, taken=found.taken, seconds=found.seconds)
    return outcome
