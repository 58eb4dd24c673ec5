"""A plan compiled for the running forward: what to do at covered call number i, and with a tensor that another op
saves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gistkit.ir import Call, CallChoice, Decision, Passing, Plan, Reading, Save, SavedGraph
from gistkit.planning.forms import intolerant, recompute_plan
from gistkit.runtime.program.joint_gradients import Headroom, headrooms
from gistkit.runtime.program.settings import KEEP_DENSE, WITHOUT_VALUES


@dataclass(frozen=True)
class Step:
    """The plan's word on one covered call: its choice, the decisions for its output's and its saved input's storage,
    and for the one that its op makes for itself (``own``: a pool's map, a dropout's mask).

    ``feeds_recipe`` says that a rebuild starts from this batch norm. ``memo`` is what the call's op remembers of the
    geometries that it has seen.
    """

    index: int
    op: str
    choice: CallChoice
    output: Decision | None
    input: Decision | None
    own: Decision | None = None
    feeds_recipe: bool = False
    memo: dict = field(default_factory=dict, compare=False)


Key = tuple[int, str, tuple[int, ...]]
OPEN = "kept: the plan leaves it open"
OWN_MAPS = ("max_pool2d", "dropout")


class Program:
    """One plan over one graph, indexed by the running number of the covered call.

    ``given``: the plan is the caller's. What it leaves open is kept as it is then, as its predictions have it.
    """

    def __init__(self, graph: SavedGraph, plan: Plan, given: bool = False) -> None:
        self.graph, self.plan = graph, plan
        self._decisions = {d.storage: d for d in plan.decisions}
        kept = {s.id for s in graph.kept()}
        self.passing = frozenset(p.storage for c in graph.calls for p in c.passing) - kept
        """Storages that are saved for nodes which go at once, and for no other."""
        if given:
            self._decisions = {s: Decision(s, "dense", reason=OPEN) for s in (*kept, *self.passing)} | self._decisions
        self.again = recompute_plan(graph, self._decisions, plan.choices)
        self._choices = {c.covered: c for c in plan.choices}
        self._in_recipes = {n for d in plan.decisions for n in _named(d.recipe, "bn")}
        self.kinds: dict[tuple, tuple] = {}
        """By kind of inputs the kinds of its batch norms (:mod:`gistkit.runtime.rebuild.probed`)."""
        self.sources = {s for d in plan.decisions for s in _named(d.recipe, "stash")}
        """Storages from whose values something is rebuilt."""
        self._calls = [c for c in graph.calls if c.covered >= 0]
        self._steps = [self._step(c) for c in self._calls]
        self._gaps, self._within = self._saves()
        self.fast: list[Any] = [None] * len(self._steps)
        """By covered call its :data:`gistkit.runtime.calls.fast.Entry` once it has run, else None."""

    @cached_property
    def headrooms(self) -> dict[int, Headroom]:
        """By covered call the headroom for a convolution's joint backward."""
        return headrooms(self.graph, self.plan)

    def bears_rounding(self, storage: int) -> bool:
        """Whether all that reads a storage's values in backward may be given rounded ones."""
        return intolerant(storage, self._reading) is None

    @cached_property
    def _reading(self) -> Reading:
        return Reading(self.graph)

    def carry_over(self, before: Program) -> None:
        """Take over what calls have learnt under another plan of the same graph, where the two say the same of them,
        for whatever reason."""
        for old, new in zip(before._steps, self._steps, strict=True):
            if before.fast[old.index] is not None and before._word_on(old) == self._word_on(new):
                self.fast[new.index] = before.fast[old.index]

    def _word_on(self, step: Step) -> tuple:
        """All that fast calls go by: reasons name densities, which change at every step."""
        decisions = [
            None if d is None else (replace(d, reason=""), d.storage in self.sources)
            for d in (step.output, step.input, step.own)
        ]
        return step.op, step.choice, step.feeds_recipe, decisions, self.headrooms.get(step.index)

    @property
    def length(self) -> int:
        """How many covered calls the forward makes."""
        return len(self._steps)

    def step(self, index: int) -> Step | None:
        """The step of a covered call, None past the end."""
        return self._steps[index] if index < len(self._steps) else None

    def decision(self, storage: int) -> Decision | None:
        """The decision for a storage."""
        return self._decisions.get(storage)

    def uncovered(self, key: Key) -> tuple[Decision | None, ...]:
        """Decisions for what uncovered ops save after so many covered calls, in that dtype and shape: one for each
        storage, in the order of the saves."""
        return self._gaps.get(key, ())

    @cached_property
    def goes_by_shapes(self) -> bool:
        """Whether anything that is saved, and not kept as it is, is known by its shape."""
        found = (d for saved in (self._gaps, self._within) for several in saved.values() for d in several)
        return any(d is not None and not d.stays for d in found)

    def within(self, key: Key) -> tuple[Decision | None, ...]:
        """The same for what PyTorch's own op saves in place of a covered call of that number."""
        return self._within.get(key, ())

    def norms(self) -> list[Call]:
        """The batch norms from which something is rebuilt."""
        return [c for c in self._calls if c.op == "batch_norm" and c.covered in self._in_recipes]

    def call(self, index: int) -> Call:
        """A covered call as it was captured."""
        return self._calls[index]

    def module(self, index: int) -> str:
        """The module that made a covered call."""
        return self._calls[index].module

    def origin(self, storage: int) -> tuple[str, str, tuple[int, ...]]:
        """(op, module, shape) of a storage's first saved value; blanks for -1."""
        if storage < 0:
            return "", "", ()
        known = self.graph.storages[storage]
        writers = self.graph.writers(storage)
        return (writers[-1].op, writers[-1].module, known.shape) if writers else ("input", "", known.shape)

    def _step(self, call: Call) -> Step:
        choice = self._choices.get(call.covered) or CallChoice(call.covered, call.op)
        output = self._decisions.get(self.graph.values[call.results[0]].storage) if call.results else None
        feeds = call.covered in self._in_recipes
        return Step(call.covered, call.op, choice, output, self._input(call), self._own(call), feeds)

    def _own(self, call: Call) -> Decision | None:
        """The decision for a map or mask that a covered op makes and keeps for itself."""
        if call.op not in OWN_MAPS:
            return None
        results = {self.graph.values[i].storage for i in call.results}
        made = [s.storage for s in call.saves if self.graph.storages[s.storage].producer == call.index]
        return next((self._decisions[s] for s in made if s in self._decisions and s not in results), None)

    def _input(self, call: Call) -> Decision | None:
        saved = [s.storage for s in call.saves if s.storage in self._decisions]
        own = self.graph.values[call.operands[0]].storage if call.operands else -1
        found = own if own in saved else next(iter(saved), None)
        return None if found is None else self._decisions[found]

    def _saves(self) -> tuple[dict[Key, tuple], dict[Key, tuple]]:
        """Decisions for what uncovered calls save, by covered calls so far, and covered ones, by their number."""
        gaps: dict[Key, dict[int, bool]] = defaultdict(dict)
        within: dict[Key, dict[int, bool]] = defaultdict(dict)
        done = 0
        for call in self.graph.calls:
            found, number = (gaps, done) if call.covered < 0 else (within, call.covered)
            if call.covered >= 0:
                done = call.covered + 1
            for save in _in_order(call):
                if self.graph.storages[save.storage].kind in ("input", "activation"):
                    known = found[number, save.dtype.removeprefix("torch."), save.shape]
                    known[save.storage] = known.get(save.storage, False) or (type(save) is Save and save.read)
        return self._decided(gaps), self._decided(within)

    def _decided(self, found: dict[Key, dict[int, bool]]) -> dict[Key, tuple]:
        return {key: tuple(self._saved(s, read) for s, read in saved.items()) for key, saved in found.items()}

    def _saved(self, storage: int, read: bool) -> Decision | None:
        """The decision for a storage that is saved; where no backward reads its values, as the node goes
        again at once, one that may be asked for them."""
        decision = self._decisions.get(storage)
        return KEEP_DENSE if decision is not None and not read and decision.codec in WITHOUT_VALUES else decision


def _in_order(call: Call) -> list[Save | Passing]:
    """What a call saves, in order, with what it saves for nodes that go at once."""
    found: list[Save | Passing] = list(call.saves)
    for passing in reversed(call.passing):
        found.insert(passing.position, passing)
    return found


def _named(recipe: tuple, what: str) -> set[int]:
    """The numbers of a recipe's terms of that kind."""
    if not recipe:
        return set()
    if recipe[0] == what:
        return {recipe[1]}
    return set().union(*(_named(r, what) for r in recipe[1:] if isinstance(r, tuple)))
