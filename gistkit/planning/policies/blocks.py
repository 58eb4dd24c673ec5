"""`blocks`: whole modules run anew in backward, as by ``torch.utils.checkpoint``; all else is PyTorch's own step.

What other plans run anew is written down call by call, which takes the host 20 to 40 us each. A module as a whole takes
it a number for each saved tensor, so in a step that the host bounds, as a transformer's in bf16, a few blocks anew take
less time than any other move. A module qualifies where nothing but what it is given decides what it makes, and nothing
that it does lasts: one call, on tensors and plain values; no buffer or other tensor from outside written, as by a batch
norm; nothing put away or returned by the model; no generator of its own; no calls that a capture does not see, as of
TorchScript, which saves other tensors in its first calls than in later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from gistkit.errors import PlanError
from gistkit.ir import Decision, ModuleCall, Plan, SavedGraph, by_key
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import make_plan
from gistkit.planning.simulate import Simulator

SHARES = (0.5, 0.25, 0.125, 0.0625, 0.03125)
"""The most that one of the modules keeps, of all that is kept: a network is taken as modules of each of these sizes."""


class Anew(NamedTuple):
    """A module that can run anew: its name, what that frees, and the decisions for it."""

    name: str
    nbytes: int
    decisions: tuple[Decision, ...]


class Try(NamedTuple):
    """What modules that run anew make of the step; ``exceeds``: more than the budget, or there is none."""

    exceeds: bool
    peak_bytes: int
    step_s: float
    modules: tuple[Anew, ...]


def blocks(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None) -> Plan:
    """As few of the network's first modules as the budget needs run anew, of modules of the size that takes the least
    time; without a budget, or where none is enough, those of the least peak. As `plain` it refuses nothing."""
    simulator = Simulator(graph, costs)
    plain = simulator.run(_plan(graph, ()))
    found = [Try(budget_bytes is None or plain.peak_bytes > budget_bytes, plain.peak_bytes, plain.step_s, ())]
    for modules in _divisions(_able(graph, costs.captured), graph):
        with suppress(PlanError):  # of a storage that no task of the forward makes
            found += _tries(modules, graph, simulator, budget_bytes)
    best = min(found, key=lambda t: (t.exceeds, t.peak_bytes if t.exceeds else t.step_s, t.step_s)).modules
    names, decisions = tuple(m.name for m in best), [d for m in best for d in m.decisions]
    details = {"modules": len(best)}
    return make_plan("blocks", graph, costs, budget_bytes, decisions, details=details, modules=names)


def _plan(graph: SavedGraph, modules: Sequence[Anew]) -> Plan:
    decisions = tuple(d for module in modules for d in module.decisions)
    return Plan("blocks", graph.fingerprint, decisions, (), modules=tuple(m.name for m in modules))


def _tries(modules: list[Anew], graph: SavedGraph, simulator: Simulator, room_bytes: int | None) -> list[Try]:
    """All modules but the last, with which backward begins, and ever fewer of the first until they are not enough."""

    def first(count: int) -> Try:
        run = simulator.run(_plan(graph, modules[:count]))
        exceeds = room_bytes is None or run.peak_bytes > room_bytes
        return Try(exceeds, run.peak_bytes, run.step_s, tuple(modules[:count]))

    few, enough = 0, max(1, len(modules) - 1)
    found = [first(enough)]
    while not found[0].exceeds and enough - few > 1:
        found.append(first((few + enough) // 2))
        few, enough = (len(found[-1].modules), enough) if found[-1].exceeds else (few, len(found[-1].modules))
    return found


def _divisions(able: dict[str, Anew], graph: SavedGraph) -> list[list[Anew]]:
    """The network as modules that run anew, each a share of what is kept at most, where they have parts that can."""
    names = dict.fromkeys(call.module for call in graph.calls)
    parts: dict[str, dict[str, None]] = {}
    for name in names:
        while name:
            above = name.rpartition(".")[0]
            parts.setdefault(above, {})[name] = None
            name = above

    def divided(name: str, most_bytes: float) -> list[Anew]:
        whole = able.get(name)
        if whole is not None and whole.nbytes <= most_bytes:
            return [whole]
        found = [module for part in parts.get(name, ()) for module in divided(part, most_bytes)]
        return found or ([] if whole is None else [whole])

    found = [divided("", share * graph.kept_bytes) for share in SHARES]
    return [modules for i, modules in enumerate(found) if modules and modules not in found[:i]]


def _able(graph: SavedGraph, captured: bool) -> dict[str, Anew]:
    """The modules of a graph that can run anew, by name; ``captured``: as a CUDA graph, which draws nothing anew."""
    calls, about = by_key((m.name, m) for m in graph.modules), _About(graph, captured)
    made = {name: about.anew(several[0]) for name, several in calls.items() if name and len(several) == 1}
    return {name: module for name, module in made.items() if module is not None}


class _About:
    """A graph by storage: its kind, whether the step has a block of it, the last calls that write and save it."""

    def __init__(self, graph: SavedGraph, captured: bool) -> None:
        self._graph, self._kinds = graph, [s.kind for s in graph.storages]
        self._there = {b.storage for b in graph.blocks}
        self._written = {s: c.index for c in graph.calls for s in c.writes}
        self._saved = {s.storage: c.index for c in graph.calls for s in c.saves}
        self._drawing = {t.call for t in graph.tasks if t.draws} if captured else set[int]()

    def anew(self, module: ModuleCall) -> Anew | None:
        calls, storages = self._graph.calls[module.begin : module.end], self._graph.storages
        written = {s for c in calls for s in c.writes}
        inside = {s for s in written if module.begin <= storages[s].producer < module.end}
        read = {s for c in calls for s in c.reads} - inside
        given = {s for s in read if self._kinds[s] in ("activation", "input")}
        saved = {s.storage for c in calls for s in c.saves if self._kinds[s.storage] == "activation"}
        lasting = written != inside or any(self._written.get(s, -1) >= module.end for s in read)
        # saved by others too, what is made anew would be there twice
        twice = any(self._saved[s] >= module.end for s in inside & saved)
        wanted = sorted(saved & inside & self._there)
        strange = any(c.hidden or c.index in self._drawing or "generator" in (c.options or {}) for c in calls)
        strange = strange or any(storages[s].escapes for s in inside)
        if lasting or twice or strange or not wanted or not given <= set(module.given):
            return None
        words = {
            "place": "nowhere",
            "sources": tuple(sorted(given & self._there)),
            "reason": f"{module.name} runs anew",
        }
        decisions = tuple(Decision(s, "recompute", **words) for s in wanted)
        return Anew(module.name, sum(storages[s].nbytes for s in wanted), decisions)
