"""One number of sub-batches: its problem, its simulator, its searches."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import inf

from gistkit.errors import PlanError
from gistkit.ir import Plan, SavedGraph, scaled
from gistkit.planning.cost import CostTable
from gistkit.planning.policies.optimal.build import Build, Options, encodings_of
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.retime import retimed
from gistkit.planning.policies.optimal.search import Search
from gistkit.planning.simulate import Simulator, scaled_costs

NO_PEAK = 2**62
"""The peak of what cannot run: above any budget."""


class Attempt:
    """Everything about planning a step in ``parts`` sub-batches. Seconds and bytes are those of one sub-batch."""

    def __init__(
        self,
        graph: SavedGraph,
        costs: CostTable,
        simulator: Simulator,
        fidelity: str,
        lossy: str | None,
        *,
        parts: int = 1,
        seeds: Sequence[Plan] = (),
        found: Options | None = None,
        algorithms: bool = True,
        recompute: bool = True,
        known: dict | None = None,
    ) -> None:
        self.parts, self._simulator = parts, simulator
        small = scaled(graph, parts)
        mine = costs if parts == 1 else scaled_costs(costs, graph, small)
        self._seeds = [s for s in seeds if s.sub_batches == parts]
        self.counts_late = costs.hardware.async_counts
        again = recompute and found is None
        self._open(Build(small, mine, fidelity, lossy, self._seeds, found, algorithms, again, known))

    def _open(self, build: Build) -> None:
        self._build = build
        self._bare = self._simulator.profile(replace(build.bare(), sub_batches=self.parts))
        self.problem = build.problem(self._bare)
        self.search = Search(self.problem, self.clock)

    def retimed(self, taken: Sequence[int]) -> tuple[Attempt, tuple[int, ...]] | None:
        """The attempt in which what ``taken`` ships may also leave and come back when the link has time, and the same
        choice in it; None where there is nothing new."""
        plan = self.plan(taken)
        composed, run = self._simulator.profile(plan), self._simulator.run(plan)
        new = retimed(plan.decisions, composed.transfers, run.start_s, self.problem.link)
        offered = {s: tuple(dict.fromkeys((*old, *new.get(s, ())))) for s, old in self._build.options.items()}
        if offered == self._build.options:
            return None
        other = copy(self)
        other._open(self._build.offering(offered))
        return other, other._build.seed(other.problem, plan)

    def seeds(self) -> list[tuple[int, ...]]:
        """The moves of the seeds of as many sub-batches."""
        return [self._build.seed(self.problem, s) for s in self._seeds]

    def frames(self) -> list[tuple[int, ...]]:
        """Choices to repair: nothing but what is fastest, and even segments that run anew."""
        fastest = self.search.fastest()
        found = [fastest]
        for frame in self._build.frames:
            taken = self._build.seed(self.problem, frame)
            on = {g for tie in self.problem.ties if taken[tie.on[0]] == tie.on[1] for g, _ in (tie.on, *tie.members)}
            found.append(tuple(taken[g] if g in on else m for g, m in enumerate(fastest)))
        return [f for f in dict.fromkeys(found) if self.problem.allowed(f)]

    def plan(self, taken: Sequence[int]) -> Plan:
        """The plan of the moves taken, without its figures."""
        plan = self._build.plan(self.problem, taken)
        cut = "reassociated" if self.parts > 1 and plan.fidelity == "bitwise" else plan.fidelity
        return replace(plan, sub_batches=self.parts, fidelity=cut)

    def clock(self, taken: Sequence[int]) -> tuple[float, int]:
        """(seconds of one sub-batch, peak bytes) of a choice, by simulation. Endless both where the simulator refuses
        it, for what no conflict says."""
        try:
            run = self._simulator.run(self.plan(taken))
        except PlanError:
            return inf, NO_PEAK
        return run.step_s / self.parts, run.peak_bytes

    def problem_of(self, taken: Sequence[int]) -> Problem:
        """The problem with the scratches as long-lived as they are under this choice (CUDA)."""
        return self._build.problem(self._bare, encodings_of(self.problem, taken, self._build.index))

    def again(self, taken: Sequence[int]) -> Search:
        """The search over :meth:`problem_of`."""
        return Search(self.problem_of(taken), self.clock)
