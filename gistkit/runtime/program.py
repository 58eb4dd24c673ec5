"""A plan compiled for the running forward: what to do at covered call number i, and with a tensor that another op
saves."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from gistkit.graph.saved import Call, SavedGraph
from gistkit.plan.plan import CallChoice, Decision, Plan


@dataclass(frozen=True)
class Step:
    """The plan's word on one covered call: its choice, the decisions for its output's and its saved input's storage.

    ``feeds_recipe`` says that a rebuild starts from this batch norm. ``memo`` is what the call's op remembers of the
    geometries that it has seen.
    """

    index: int
    op: str
    choice: CallChoice
    output: Decision | None
    input: Decision | None
    feeds_recipe: bool = False
    memo: dict = field(default_factory=dict, compare=False)


class Program:
    """One plan over one graph, indexed by the running number of the covered call."""

    def __init__(self, graph: SavedGraph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self._decisions = {d.storage: d for d in plan.decisions}
        self._choices = {c.covered: c for c in plan.choices}
        self._in_recipes = {n for d in plan.decisions for n in _batch_norms(d.recipe)}
        self._calls = [c for c in graph.calls if c.covered >= 0]
        self._steps = [self._step(c) for c in self._calls]
        self._gaps = self._saves_between()

    @property
    def length(self) -> int:
        """How many covered calls the forward makes."""
        return len(self._steps)

    def step(self, index: int) -> Step | None:
        """The step of a covered call, None past the end."""
        return self._steps[index] if index < len(self._steps) else None

    def uncovered(self, calls: int, x: torch.Tensor) -> Decision | None:
        """Decision for what an uncovered op saves after ``calls`` covered ones; None where none fits it."""
        return self._gaps.get((calls, str(x.dtype).removeprefix("torch."), tuple(x.shape)))

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
        return Step(call.covered, call.op, choice, output, self._input(call), call.covered in self._in_recipes)

    def _input(self, call: Call) -> Decision | None:
        saved = [s.storage for s in call.saves if s.storage in self._decisions]
        own = self.graph.values[call.operands[0]].storage if call.operands else -1
        found = own if own in saved else next(iter(saved), None)
        return None if found is None else self._decisions[found]

    def _saves_between(self) -> dict[tuple, Decision]:
        """Decisions for what uncovered calls save, by (covered calls so far, dtype, shape); ambiguous ones left out."""
        found: dict[tuple, set[int]] = defaultdict(set)
        done = 0
        for call in self.graph.calls:
            if call.covered >= 0:
                done = call.covered + 1
                continue
            for save in call.saves:
                if save.storage in self._decisions:
                    found[(done, save.dtype.removeprefix("torch."), save.shape)].add(save.storage)
        return {key: self._decisions[s.pop()] for key, s in found.items() if len(s) == 1}


def _batch_norms(recipe: tuple) -> set[int]:
    if not recipe:
        return set()
    if recipe[0] == "bn":
        return {recipe[1]}
    return set().union(*(_batch_norms(r) for r in recipe[1:] if isinstance(r, tuple)))
