"""The Gist policy (Jain et al., ISCA 2018): every kept storage gets the encoding that its readers allow.

| storage | lossless | paper |
|---|---|---|
| ReLU output, values read by nobody | 1-bit mask, or nothing where the pool's map carries it | Binarize, III-A, IV-A |
| ReLU output after a batch norm | rebuilt from the batch norm's kept input | beyond the paper |
| ReLU, pool, dropout output read by value | zero-value compression or CSR, whichever is smaller | SSDC, III-A, IV-A |
| max-pool index, dropout mask, bool | 4 or 8 bits, 1 bit | IV-A |
| read by shape only | nothing | IV-A |
| anything else | dense; with ``lossy`` a narrow float | DPR, III-B, IV-A |

Masks, maps and sparse structure are never narrowed. docs/planner.md, "Policies", says where it departs from the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gistkit.formats import Lossy, narrow_of
from gistkit.ir import Decision, Plan, Reading, SavedGraph, SavedStorage
from gistkit.planning.cost import CostTable, Densities
from gistkit.planning.forms import (
    MAX_DEPTH,
    SPARSE,
    Judge,
    call_choices,
    check_lossy,
    depth,
    encodings,
    held,
    intolerant,
    make_plan,
    rebuilt,
    rounded,
)  # fmt: skip

MIB = 2**20
PAYS = 0.95
"""An encoding has to save a twentieth of the dense bytes to be worth its two passes."""
SPARED, SPARED_EACH = 0.05, 2**-8
"""For the host's time a plan gives up encodings that save at most so small a share of plain's kept bytes each, together
at most SPARED of what all save and of what the plan keeps: an encoding costs the host 0.05 to 0.15 ms however little it
saves, a 256th of a step of 30 ms. DenseNet-121 (128 images of 224x224) has 80 for 125 then, and 4.9 % less gain."""


def gist(
    graph: SavedGraph,
    *,
    lossy: Lossy = None,
    densities: Mapping[int, float] | None = None,
    rebuild: bool = True,
    sparse: bool = True,
    spares_host: bool = False,
) -> Plan:
    """The Gist policy's plan for one step. ``lossy`` names the format of delayed precision reduction, for all or by
    storage id; None plans bit-exact moves only. ``densities`` maps storage ids to measured shares of non-zero elements;
    unmeasured storages are planned by what their producers suggest. ``rebuild`` False leaves rebuilding out, as the
    paper does, and ``sparse`` False sparse forms. ``spares_host``: leaves out the smallest encodings, as SPARED says.
    Raises ValueError for an unknown format."""
    check_lossy(lossy)
    planner = Planner(graph, lossy, densities, rebuild, sparse)
    decisions = planner.decisions()
    if spares_host and planner.leave_smallest(decisions):
        decisions = planner.decisions()
    return Plan(
        policy="gist",
        fingerprint=graph.fingerprint,
        decisions=decisions,
        choices=call_choices(planner.reading, {d.storage: d for d in decisions}),
        plain_bytes=graph.kept_bytes,
        kept_bytes=sum(planner.predicted_bytes(d) for d in decisions),
        details={"lossy": lossy},
        fidelity="lossy" if any(d.form.rounds_to for d in decisions) else "bitwise",
    )


def gist_budget(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None, *, lossy: Lossy = None) -> Plan:
    """Gist's plan, lossless or in a narrow format, with peak and seconds. Raises ValueError for an unknown format."""
    made = gist(graph, lossy=lossy, densities=costs.densities, sparse=bool(costs.densities))
    return figured(graph, costs, budget_bytes, made)


def figured(graph: SavedGraph, costs: CostTable, budget_bytes: int | None, found: Plan) -> Plan:
    """Gist's plan with peak and seconds: decisions of kept blocks, with values where backward reads them."""
    read = {b.storage: any(u.values for u in b.uses) for b in held(graph) if b.storage >= 0}
    known = (d for d in found.decisions if d.storage in read)
    taken = tuple(d for d in known if d.form.values or d.form.made_by_op or not read[d.storage])
    choices = call_choices(Reading(graph), {d.storage: d for d in taken})
    fidelity = "lossy" if any(d.form.rounds_to for d in taken) else "bitwise"
    return make_plan("gist", graph, costs, budget_bytes, taken, choices, details=found.details, fidelity=fidelity)


class Planner:
    """Decides every kept storage of one graph, each once: the smallest of the forms that the judge allows."""

    def __init__(
        self, graph: SavedGraph, lossy: Lossy, densities: Mapping[int, float] | None, rebuild: bool, sparse: bool
    ) -> None:
        self._judge = Judge(graph)
        self.reading = self._judge.reading
        self._densities = Densities(self.reading, densities)
        self._graph = graph
        self._lossy = lossy
        self._rebuilds, self._sparse = rebuild, SPARSE if sparse else ()
        self._decided: dict[int, Decision] = {}
        self._left: dict[int, Decision] = {}

    def decisions(self) -> tuple[Decision, ...]:
        """The decisions for all that plain PyTorch keeps."""
        return tuple(d for d in (self.decide(s.id) for s in self._graph.kept()) if d is not None)

    def leave_smallest(self, decisions: tuple[Decision, ...]) -> bool:
        """Leave out the smallest encodings of these decisions, as SPARED says; whether there are any. What an operator
        makes for itself costs the host nothing besides."""
        saved = {d.storage: self._graph.storages[d.storage].nbytes - self.predicted_bytes(d) for d in decisions}
        gain, kept_bytes = sum(saved.values()), self._graph.kept_bytes
        spared_bytes = SPARED * min(gain, kept_bytes - gain)
        for d in sorted((d for d in decisions if not (d.stays or d.form.made_by_op)), key=lambda d: saved[d.storage]):
            spared_bytes -= saved[d.storage]
            if spared_bytes < 0 or saved[d.storage] > SPARED_EACH * kept_bytes:
                break
            why = f"too small for the host's time: {saved[d.storage] / MIB:,.2f} of {kept_bytes / MIB:,.2f} MiB"
            self._left[d.storage] = Decision(d.storage, "dense", reason=why)
        self._decided = dict(self._left)
        return bool(self._left)

    def decide(self, storage: int) -> Decision | None:
        """The decision for a storage, None where plain PyTorch does not keep it either."""
        if storage not in self._judge.kept:
            return None
        if storage not in self._decided:
            self._decided[storage] = self._decision(self._graph.storages[storage])
        return self._decided[storage]

    def predicted_bytes(self, decision: Decision) -> int:
        storage = self._graph.storages[decision.storage]
        return decision.kept_bytes(storage.nbytes, storage.dtype, self._density(storage.id))

    def _density(self, storage: int) -> float | None:
        saved = self.reading.saved(storage)
        return None if saved is None else self._densities.of(storage, saved.version)

    def _decision(self, s: SavedStorage) -> Decision:
        found = self._judge.own_map(s.id) or self._judge.without_values(s.id)
        if found is not None:
            return found
        why = self._judge.why_dense(s.id)
        return Decision(s.id, "dense", reason=why) if why else self._with_values(s)

    def _with_values(self, s: SavedStorage) -> Decision:
        """The smallest of: dense, sparse, narrow, rebuilt; exact forms win ties."""
        who = f"{self.reading.uses(s.id).readers[0][0].op} reads its values"
        density = self._density(s.id)
        names = encodings(() if density is None else self._sparse, narrow_of(self._lossy, s.id))
        forms = self._judge.allowed(s.id, names)
        best = min(forms, key=self.predicted_bytes, default=None)
        if best is None or self.predicted_bytes(best) > PAYS * s.nbytes:
            best = Decision(s.id, "dense", reason=f"{who}{self._why_none_pays(density, forms)}")
        else:
            zeros = "" if density is None else f", and {1 - density:.0%} of them are zeros"
            rest = f", the rest in {best.form.rounds_to}" if best.form.rounds_to else ""
            why = f"{zeros}{rest}" if best.form.sparse else f": {best.form.rounds_to} until then"
            best = replace(best, reason=f"{who}{why}")
        again = self._rebuilt(s.id) if self._rebuilds else None
        return again if again and self.predicted_bytes(again) < self.predicted_bytes(best) else best

    def _why_none_pays(self, density: float | None, forms: tuple[Decision, ...]) -> str:
        if density is not None and not self._sparse:
            return ", and sparse forms are switched off"
        if density is not None:
            return f", and with {density:.0%} non-zeros no encoding pays"
        exactly = " exactly" if self._lossy is not None and not forms else ""
        return f"{exactly}, and nothing speaks for zeros in them"

    def _rebuilt(self, storage: int) -> Decision | None:
        recipe = self._judge.recipe(storage, self.decide)
        found = None if recipe is None else rebuilt(storage, recipe)
        if found is None or depth(found, self.decide) > MAX_DEPTH:
            return None
        exact = not any(rounded(source, self.decide) for source in found.sources)
        return found if exact or intolerant(storage, self.reading) is None else None
