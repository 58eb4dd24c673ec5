"""The class of moves that is allowed, and other policies' plans of it, which are taken over as they are where nothing
that `optimal` found itself is as fast: they do what `optimal` does not choose (calls in place, slices of single
gradients)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gistkit.errors import PlanError
from gistkit.ir import RERUN, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES, Replays, check_fidelity, own_decisions
from gistkit.planning.simulate import Simulator, trains_batch_norm


@dataclass(frozen=True)
class Allowed:
    """The class of moves: its name and narrow format, sub-batches under batch norm, choice of algorithms, segments that
    run anew."""

    fidelity: str = "bitwise"
    lossy: str | None = None
    batch_norm: bool = False
    algorithms: bool = False
    recompute: bool = True

    @staticmethod
    def of(
        costs: CostTable, fidelity: str, lossy: str | None, batch_norm: bool, algorithms: bool | None, recompute: bool
    ) -> Allowed:
        """The class, ``algorithms`` None where the costs say. Raises ValueError for an unknown class or format."""
        check_fidelity(fidelity, lossy)
        told = costs.tells_algorithms(fidelity) if algorithms is None else algorithms
        return Allowed(fidelity, lossy, batch_norm, told, recompute)

    def admits(self, plan: Plan, graph: SavedGraph) -> bool:
        """Whether all of a plan's moves are of the class; algorithms apart, which can be left out."""
        if FIDELITIES.index(plan.fidelity) > FIDELITIES.index(self.fidelity):
            return False
        if plan.sub_batches > 1 and self.part_counts(graph, plan.sub_batches) == [1]:
            return False
        return self.recompute or all(d.form.returns != RERUN for d in plan.decisions)

    def part_counts(self, graph: SavedGraph, *others: int) -> list[int]:
        """Numbers of sub-batches to look at: 1, powers of two up to the most, the most (the batch, if single rows go
        the same way), and ``others`` up to that."""
        most = graph.most_parts
        if self.fidelity == "bitwise" or most < 2 or (trains_batch_norm(graph) and not self.batch_norm):
            return [1]
        powers = {2**i for i in range(most.bit_length()) if 2**i <= most}
        return sorted(powers | {most} | {n for n in others if 1 <= n <= most})


def fastest_whole(
    plans: Iterable[Plan], graph: SavedGraph, simulator: Simulator, allowed: Allowed, room_bytes: int | None
) -> Plan | None:
    """The fastest of the plans within ``room_bytes`` that the class admits, as a plan of `optimal` with its seconds;
    None where there is none. Without a choice of algorithms each convolution keeps its default."""
    best: Plan | None = None
    for plan in _whole(plans, graph, allowed):
        try:
            run = simulator.run(plan)
        except PlanError:
            continue  # it leans on its own policy's way of running
        fits = room_bytes is None or run.peak_bytes <= room_bytes
        if fits and (best is None or run.step_s < best.step_s):
            best = replace(plan, step_s=run.step_s)
    return best


def _whole(plans: Iterable[Plan], graph: SavedGraph, allowed: Allowed) -> Iterator[Plan]:
    own, replays = own_decisions(graph), Replays(graph)
    for plan in plans:
        if not allowed.admits(plan, graph) or len(replays.able(plan.decisions)) < len(plan.decisions):
            continue
        decided = {d.storage for d in plan.decisions}
        choices = plan.choices if allowed.algorithms else tuple(replace(c, algorithm="") for c in plan.choices)
        details = {} if plan.policy == "optimal" else {"taken_from": plan.policy}
        # maps and bits: without a decision the operators make them all the same; what goes, only with one
        open_ = tuple(d for d in own if d.storage not in decided)
        for more in dict.fromkeys((tuple(d for d in open_ if not d.form.gone), open_)):
            decisions = (*plan.decisions, *more)
            yield replace(plan, policy="optimal", decisions=decisions, choices=choices, details=details)
