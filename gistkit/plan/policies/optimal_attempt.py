"""One number of sub-batches: its problem, its simulator, its searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gistkit.graph.saved import SavedGraph
from gistkit.graph.scale import scaled
from gistkit.plan.cost import CostTable
from gistkit.plan.plan import Plan
from gistkit.plan.policies.optimal_build import Build, Options, encodings_of
from gistkit.plan.policies.optimal_problem import Problem
from gistkit.plan.policies.optimal_search import Search
from gistkit.plan.simulate import Simulator
from gistkit.plan.sub_batches import scaled_costs


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
    ) -> None:
        self.parts, self._simulator = parts, simulator
        small = scaled(graph, parts)
        mine = costs if parts == 1 else scaled_costs(costs, graph, small)
        self._seeds = [s for s in seeds if s.sub_batches == parts]
        self._build = Build(small, mine, fidelity, lossy, self._seeds, found, algorithms)
        self._bare = simulator.profile(replace(self._build.bare(), sub_batches=parts))
        self.problem = self._build.problem(self._bare)
        self.counts_late = costs.hardware.async_counts
        self.search = Search(self.problem, self.clock)

    def seeds(self) -> list[tuple[int, ...]]:
        """The moves of the seeds of as many sub-batches."""
        return [self._build.seed(self.problem, s) for s in self._seeds]

    def plan(self, taken: Sequence[int]) -> Plan:
        """The plan of the moves taken, without its figures."""
        plan = self._build.plan(self.problem, taken)
        cut = "reassociated" if self.parts > 1 and plan.fidelity == "bitwise" else plan.fidelity
        return replace(plan, sub_batches=self.parts, fidelity=cut)

    def clock(self, taken: Sequence[int]) -> tuple[float, int]:
        """(seconds of one sub-batch, peak bytes) of a choice, by simulation."""
        run = self._simulator.run(self.plan(taken))
        return run.step_s / self.parts, run.peak_bytes

    def problem_of(self, taken: Sequence[int]) -> Problem:
        """The problem with the scratches as long-lived as they are under this choice (CUDA)."""
        return self._build.problem(self._bare, encodings_of(self.problem, taken, self._build.index))

    def again(self, taken: Sequence[int]) -> Search:
        """The search over :meth:`problem_of`."""
        return Search(self.problem_of(taken), self.clock)
