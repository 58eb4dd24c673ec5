"""Other policies' plans taken over as they are, where nothing that `optimal` found itself is as fast.

Their decisions are offered to the program one by one; some are worth more together with what the program does not
choose (calls in place, slices of single gradients), so every plan that is of the allowed class competes whole as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gistkit.errors import PlanError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.forms import FIDELITIES, Replays, own_decisions
from gistkit.planning.simulate import Simulator, trains_batch_norm

MOST_OFFERED = 2


@dataclass(frozen=True)
class Allowed:
    """The class of moves: its name, sub-batches under batch norm, choice of algorithms, segments that run anew."""

    fidelity: str
    batch_norm: bool
    algorithms: bool
    recompute: bool

    def admits(self, plan: Plan, graph: SavedGraph) -> bool:
        """Whether all of a plan's moves are of the class; algorithms apart, which can be left out."""
        if FIDELITIES.index(plan.fidelity) > FIDELITIES.index(self.fidelity):
            return False
        if plan.sub_batches > 1 and (self.fidelity == "bitwise" or (trains_batch_norm(graph) and not self.batch_norm)):
            return False
        return self.recompute or all(d.codec != "recompute" for d in plan.decisions)


def fastest_whole(
    seeds: Iterable[Plan], graph: SavedGraph, simulator: Simulator, allowed: Allowed, room_bytes: int | None
) -> Plan | None:
    """The fastest of the plans within ``room_bytes`` that the class admits, as a plan of `optimal` with its seconds;
    None where there is none. Without a choice of algorithms each convolution keeps its default."""
    best: Plan | None = None
    for plan in _whole(seeds, graph, allowed):
        try:
            run = simulator.run(plan)
        except PlanError:
            continue  # it leans on its own policy's way of running
        fits = room_bytes is None or run.peak_bytes <= room_bytes
        if fits and (best is None or run.step_s < best.step_s):
            best = replace(plan, peak_bytes=run.peak_bytes, step_s=run.step_s)
    return best


def offered(seeds: Iterable[Plan], simulator: Simulator, room_bytes: int | None) -> list[Plan]:
    """The plans whose single decisions are worth a place in the program: the fastest that fit, and those with segments
    that run anew. Every further one would make it larger for decisions of which it has better ones. One that decides
    nothing offers nothing, and takes no place."""
    fitting, again = [], []
    for plan in (s for s in seeds if s.decisions):
        try:
            run = simulator.run(plan)
        except PlanError:
            continue
        if room_bytes is None or run.peak_bytes <= room_bytes:
            fitting.append((run.step_s, plan))
        if any(d.codec == "recompute" for d in plan.decisions):
            again.append(plan)
    fastest = [plan for _, plan in sorted(fitting, key=lambda f: f[0])[:MOST_OFFERED]]
    return [*fastest, *(p for p in again if p not in fastest)]


def _whole(seeds: Iterable[Plan], graph: SavedGraph, allowed: Allowed) -> Iterator[Plan]:
    own, replays = own_decisions(graph), Replays(graph)
    for seed in seeds:
        if not allowed.admits(seed, graph) or len(replays.able(seed.decisions)) < len(seed.decisions):
            continue
        decided = {d.storage for d in seed.decisions}
        choices = seed.choices
        if not allowed.algorithms:
            choices = tuple(replace(c, algorithm="") for c in choices)
        details = {} if seed.policy == "optimal" else {"taken_from": seed.policy}
        # maps and bits: without a decision the operators make them all the same; what goes, only with one
        open_ = [d for d in own if d.storage not in decided]
        made = tuple(d for d in open_ if d.codec != "drop")
        for more in (made, tuple(open_)) if len(made) < len(open_) else (made,):
            decisions = (*seed.decisions, *more)
            yield replace(seed, policy="optimal", decisions=decisions, choices=choices, details=details)
