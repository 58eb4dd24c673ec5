"""One network under Gist's encodings and CNTK's allocators: footprints as the paper counts them.

Baseline and encodings follow the paper, not gistkit's runtime: max-pool reads X and Y unless Binarize gives it a map;
sparse storage is CSR with one-byte columns; what SSDC or DPR encode is decoded for every backward use, a ReLU's own
too; ReLUs write an output of their own unless in-place is on, and then take over the convolution's (section III-C), in
forward alone. Counted are stashed and immediately consumed feature maps and gradient maps (section V-A).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bench.papers.algorithms import paper_algorithms
from bench.papers.allocators import dynamic_bytes, feature_maps, investigation_bytes, static_sharing, turn_of
from bench.papers.library_view import FORWARD_ALONE, library_view
from gistkit.ir.plan import Decision, Plan
from gistkit.ir.saved_graph import SavedGraph
from gistkit.ir.tasks import Block, Use
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import CostTable, cost_table
from gistkit.planning.forms.predicted import held
from gistkit.planning.policies.convolutions import MEMORY, ConvAlgorithms
from gistkit.planning.policies.gist_rules import figured, gist
from gistkit.planning.policies.registry import plain
from gistkit.planning.simulate.intervals import Interval
from gistkit.planning.simulate.simulator import Simulator, simulate

BINARIZE, SSDC, DPR, INPLACE = "binarize", "ssdc", "dpr", "inplace"
"""Gist's encodings. Its in-place ReLUs are a matter of the library's view: gistkit's own plans overwrite nothing."""
ENCODINGS = (BINARIZE, SSDC, DPR, INPLACE)


@dataclass(frozen=True)
class Footprint:
    """Bytes under one set of encodings: with CNTK's static sharing, with stashed maps unshared (the investigation
    baseline), under dynamic allocation, under that without decoded buffers (optimised software); of the second, what is
    stashed."""

    static: int
    investigation: int
    dynamic: int
    optimised: int
    stashed: int

    @property
    def immediate(self) -> int:
        """The investigation baseline's immediately consumed and gradient maps."""
        return self.investigation - self.stashed


@dataclass(frozen=True)
class Case:
    """A step captured with its ReLUs out of place, on a card, with the density of what may hold zeros."""

    graph: SavedGraph
    card: str
    density: float

    @cached_property
    def baseline(self) -> Footprint:
        """CNTK's, before any encoding."""
        view = library_view(self.graph, inplace=False)
        costs = self._costs(view)
        return self._footprint(view, plain(view, costs), costs)

    def encoded(self, encodings: Sequence[str], lossy: str | None = None, *, both_ways: bool = False) -> Footprint:
        """Under some of Gist's encodings; DPR alone encodes every stashed map. ``both_ways``: a ReLU in place lets its
        dX overwrite dY as well, of which the paper does not speak."""
        view, plan, costs = self._planned(encodings, lossy, both_ways=both_ways)
        return self._footprint(view, plan, costs)

    def gist(self, lossy: str | None = None, *, both_ways: bool = False) -> Footprint:
        """Under all lossless encodings, or with DPR in a format as well."""
        return self.encoded(ENCODINGS, lossy, both_ways=both_ways)

    @property
    def map_share(self) -> float:
        """Share of what the baseline's maps take in all memory: maps, weights, weight gradients (no workspace)."""
        weights = sum(b.nbytes for b in self.graph.blocks if b.kind in ("weight", "buffer", "weight_gradient"))
        return self.baseline.static / (self.baseline.static + weights)

    def overhead(self, encodings: Sequence[str], lossy: str | None = None) -> float:
        """Seconds that a plan adds, as a share of the baseline's, under memory-optimal convolutions (section V-A)."""
        return self.step_s(encodings, lossy) / self._plain_s - 1

    def step_s(self, encodings: Sequence[str] = (), lossy: str | None = None) -> float:
        """Seconds of a step under memory-optimal convolutions; without encodings, the baseline's."""
        if encodings:
            view, plan, costs = self._planned(encodings, lossy, once=True)
        else:
            view = library_view(self.graph, inplace=False)
            costs = self._costs(view)
            plan = plain(view, costs)
        convs = ConvAlgorithms(view, costs)
        return simulate(view, replace(plan, choices=(*plan.choices, *convs.choices(convs.of(MEMORY)))), costs).step_s

    @cached_property
    def _plain_s(self) -> float:
        return self.step_s()

    @cached_property
    def costs(self) -> CostTable:
        """The baseline's costs."""
        return self._costs(library_view(self.graph, inplace=False))

    def _costs(self, view: SavedGraph) -> CostTable:
        return cost_table(view, hardware(self.card), density=self.density, ways=paper_algorithms)

    def _planned(
        self, encodings: Sequence[str], lossy: str | None, *, once: bool = False, both_ways: bool = False
    ) -> tuple[SavedGraph, Plan, CostTable]:
        inplace = INPLACE in encodings and (both_ways or FORWARD_ALONE)
        view = library_view(self.graph, inplace=inplace, maps=BINARIZE in encodings)
        costs = self._costs(view)
        if tuple(encodings) == (DPR,) and lossy is not None:
            plan = Plan("gist", view.fingerprint, narrowed(view, lossy), ())
        else:
            plan = as_csr(gist_with(view, costs, encodings, lossy))
        return decoded_view(view, plan, once), plan, costs

    def _footprint(self, view: SavedGraph, plan: Plan, costs: CostTable) -> Footprint:
        maps = [i for i in feature_maps(view, Simulator(view, costs).profile(plan)) if i.what != "scratch"]
        turn = turn_of(view)
        return Footprint(
            static=static_sharing(maps).total_bytes,
            investigation=investigation_bytes(maps, turn),
            dynamic=dynamic_bytes(maps),
            optimised=dynamic_bytes(i for i in maps if i.what != "decoded"),
            stashed=stashed_bytes(maps, turn),
        )


def gist_with(view: SavedGraph, costs: CostTable, encodings: Collection[str], lossy: str | None = None) -> Plan:
    """Gist's plan with some of its encodings alone, without rebuilds. Values are narrowed, inside sparse storage too,
    where DPR is among them. A ReLU that a pool reads keeps its values, unless the view has pool maps."""
    found = gist(view, lossy=lossy if DPR in encodings else None, densities=costs.densities, rebuild=False)
    decisions = tuple(d for d in found.decisions if _encoding(d) in (None, *encodings))
    return figured(view, costs, None, replace(found, decisions=decisions))


def _encoding(decision: Decision) -> str | None:
    """Which of Gist's encodings a decision is; None for what keeps the tensor as it is."""
    if not decision.form.values or decision.form.made_by_op:
        return BINARIZE
    if decision.form.sparse:
        return SSDC
    return DPR if decision.form.rounds_to else None


def stashed_bytes(maps: Sequence[Interval], turn: int) -> int:
    """Bytes of what lives from the forward into the backward."""
    return sum(i.nbytes for i in maps if i.first < turn <= i.last)


def as_csr(plan: Plan) -> Plan:
    """The plan with the paper's sparse format in place of ours."""
    return replace(plan, decisions=tuple(replace(d, codec=d.codec.replace("zvc", "csr")) for d in plan.decisions))


def narrowed(view: SavedGraph, lossy: str) -> tuple[Decision, ...]:
    """DPR alone (Fig. 13): every stashed feature map in a narrow format."""
    blocks = [b for b in held(view) if b.storage >= 0 and b.kind == "activation" and b.dtype == "float32"]
    return tuple(Decision(b.storage, lossy) for b in blocks if b.uses)


def decoded_view(view: SavedGraph, plan: Plan, once: bool = False) -> SavedGraph:
    """The view in which every backward use of what SSDC or DPR encoded asks for values: cuDNN reads FP32 alone.

    The simulator decodes for each use, in memory and in time. ``once``: for seconds, a ReLU's own use goes with the use
    beside it, whose decoded copy serves both.
    """
    coded = {d.storage for d in plan.decisions if d.form.decoded_by_reader}

    def uses(block: Block) -> tuple[Use, ...]:
        if once and any(u.values for u in block.uses):
            return tuple(u for u in block.uses if u.values)
        return tuple(replace(u, values=True) for u in block.uses)

    blocks = tuple(replace(b, uses=uses(b)) if b.storage in coded else b for b in view.blocks)
    return replace(view, blocks=blocks)
