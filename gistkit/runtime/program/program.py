"""A plan compiled for a forward: what to do at covered call number i, and with tensors that other ops save."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gistkit.codecs import dtype_of
from gistkit.formats import AUTO, MAX_ERROR
from gistkit.ir import (
    FORMS,
    NEVER,
    OPERATORS,
    STAY,
    Call,
    CallChoice,
    Decision,
    Passing,
    Plan,
    Reading,
    Save,
    SavedGraph,
    norms,
)
from gistkit.planning.forms import default_form, intolerant, recompute_plan
from gistkit.planning.simulate import by_pytorch
from gistkit.runtime.program.joint_gradients import roomy_calls
from gistkit.runtime.program.timetable import Timetable, timetable
from gistkit.runtime.recompute.modules import Known
from gistkit.runtime.recompute.steps import Recordings

KEEP_DENSE = Decision(-1, "dense", reason="kept as it is")
WITHOUT_VALUES = tuple(f for f in FORMS.values() if f.returns in (NEVER, OPERATORS) and not f.made_by_op)
"""Forms by which no reader finds the values in a stash."""


@dataclass(frozen=True)
class Settings:
    """What the caller allows: a lossy format, None, or AUTO (each storage's is the plan's), whether sums may be
    reassociated, and the least share of the kept bytes that a plan of gistkit's own must save. With AUTO the error of
    the gradients, and after how many steps it is measured again (0: never). ``sparse``: whether a plan of gistkit's own
    may take forms whose size hangs on the values."""

    lossy: str | None = None
    fidelity: str = "bitwise"
    min_gain: float = 0.02
    max_error: float = MAX_ERROR
    remeasure_every: int = 0
    sparse: bool = True


def ad_hoc(x: torch.Tensor, sparse: bool, settings: Settings) -> Decision:
    """The decision for a tensor that no plan knows."""
    nbytes, lossy = x.numel() * x.element_size(), None if settings.lossy == AUTO else settings.lossy
    zeros = sparse and settings.sparse
    return default_form(str(x.dtype).removeprefix("torch."), nbytes, zeros=zeros, lossy=lossy)


@dataclass(frozen=True)
class Step:
    """The plan's word on one covered call: its choice, the decisions for its output's and its saved input's storage,
    and for the one that its op makes for itself (``own``: a pool's map, a dropout's mask). ``feeds_recipe``: a rebuild
    starts from this batch norm; ``is_source``: one starts from the call's output."""

    index: int
    op: str
    choice: CallChoice
    output: Decision | None
    input: Decision | None
    own: Decision | None = None
    feeds_recipe: bool = False
    is_source: bool = False


Key = tuple[int, torch.dtype, tuple[int, ...]]
OPEN = "kept: the plan leaves it open"
OWN_MAPS = ("max_pool2d", "dropout")


class Program:
    """One plan over one graph, indexed by the running number of the covered call. ``given``: the plan is the caller's.
    What it leaves open is kept as it is then, as its predictions have it. ``decisions``: by storage; ``passing``:
    storages that are saved for nodes which go at once, and for no other; ``sources``: storages from whose values
    something is rebuilt. ``is_stale``: a backward has shown that the model goes another way than it was captured. By
    covered call: ``covered``, as captured; ``steps``; ``calls``, how it runs (:mod:`gistkit.runtime.calls`) once
    specialised; ``checked``, the kind in which it was seen to be the planned one. ``gaps``: by (covered calls so far,
    dtype, shape) the decisions for what uncovered ops save, one for each storage, in the order of the saves;
    ``within``: the same for what PyTorch's own op saves in place of a covered call."""

    def __init__(self, graph: SavedGraph, plan: Plan, given: bool = False) -> None:
        self.graph, self.plan, self._given, self.is_stale = graph, plan, given, False
        self.decisions = {d.storage: d for d in plan.decisions}
        kept = {s.id for s in graph.kept()}
        self.passing = frozenset(p.storage for c in graph.calls for p in c.passing) - kept
        if given:
            self.decisions = {s: Decision(s, "dense", reason=OPEN) for s in (*kept, *self.passing)} | self.decisions
        self.again = None if plan.modules else recompute_plan(graph, self.decisions)
        self.recordings = Recordings(graph)
        self._choices = {c.covered: c for c in plan.choices}
        self._in_recipes = {n for d in plan.decisions for n in norms(d.recipe)}
        self.sources = {s for d in plan.decisions for s in _stashes(d.recipe)}
        self.covered = [c for c in graph.calls if c.covered >= 0]
        self.steps = [self._step(c) for c in self.covered]
        self.calls: list[Any] = [None] * len(self.steps)
        self.checked: list[Any] = [None] * len(self.steps)
        self.modules: dict[str, Known] = {}
        """Of the plan's modules, by name."""
        self.norm_kinds: dict[tuple, tuple] = {}
        """By rows and device what :mod:`gistkit.runtime.rebuild.arithmetic` probes ahead."""
        self._unread: tuple[set[int], set[int]] = set(), set()
        self.gaps, self.within = self._saves()

    @cached_property
    def roomy_calls(self) -> frozenset[int]:
        return roomy_calls(self.graph, self.plan)

    @cached_property
    def times(self) -> Timetable | None:
        """When what the plan places on the host goes and comes; None where it places nothing there."""
        return timetable(self.graph, self.plan) if any(d.on_host for d in self.plan.decisions) else None

    @cached_property
    def _reading(self) -> Reading:
        return Reading(self.graph)

    def bears_rounding(self, storage: int) -> bool:
        """Whether all that reads a storage's values in backward may be given rounded ones."""
        return intolerant(storage, self._reading) is None

    @property
    def runs_plain(self) -> bool:
        """Whether PyTorch's own operators run the step: all of it, or modules of the plan anew."""
        return bool(self.plan.modules) or (by_pytorch(self.plan) and not self.plan.decisions and not self.plan.choices)

    @cached_property
    def may_gain_zeros(self) -> bool:
        """Whether a ReLU's output is kept as it is for want of zeros, which may come."""
        return any(s.op == "relu" and s.output is not None and s.output.stays for s in self.steps)

    @cached_property
    def dense_storages(self) -> tuple[tuple[int, int, str], ...]:
        """(storage, bytes, reason) of what is kept for backward as it is, by the capture."""
        kept = ((s, self.decisions.get(s.id)) for s in self.graph.kept() if s.kind != "parameter")
        return tuple((s.id, s.nbytes, d.reason if d else "") for s, d in kept if d is None or d.stays)

    @cached_property
    def settled(self) -> frozenset[int]:
        """Storages that stay as they are in every forward and are no sources: of them only the capture is recorded."""
        return frozenset(s for s, _, _ in self.dense_storages if s in self.decisions) - self.sources

    @cached_property
    def held_outputs(self) -> frozenset[int]:
        """Covered calls from whose outputs, kept as they are, something is rebuilt."""
        sources = (s for s in self.steps if s.is_source and s.output is not None and s.output.form.returns == STAY)
        return frozenset(s.index for s in sources)

    @cached_property
    def caught(self) -> frozenset[int]:
        """After how many covered calls an uncovered one saves something that is to be caught: what is not kept as it
        is, what recipes start from, or what backward reads no value of and, without a plan of the caller's, no other
        node keeps as it is."""
        return self._numbers(self.gaps, self._unread[0])

    @cached_property
    def catching(self) -> frozenset[int]:
        """The uncovered calls, by their number in the graph, that save something to be caught."""
        saves = ((c.index, s) for c in self.graph.calls for s in _in_order(c))
        return frozenset(i for i, s in saves if not getattr(s, "read", True) or self.catches(s.storage))

    @cached_property
    def caught_within(self) -> frozenset[int]:
        """The same of the covered calls in whose place PyTorch's own op runs."""
        return self._numbers(self.within, self._unread[1])

    def _numbers(self, found: dict[Key, tuple], unread: set[int]) -> frozenset[int]:
        return frozenset(key[0] for key, several in found.items() if any(map(self._is_caught, several))) | unread

    def catches(self, storage: int) -> bool:
        """Whether a storage is to be caught where an uncovered call saves it."""
        return self._is_caught(self.decisions.get(storage))

    def _is_caught(self, decision: Decision | None) -> bool:
        return _changes(decision) or (decision is not None and decision.storage in self.sources)

    @cached_property
    def catches_functions(self) -> bool:
        """Whether a custom autograd Function, which no function mode sees, saves something to be caught."""
        return any(_changes(self.decisions.get(s.storage)) for c in self.graph.calls if c.hidden for s in c.saves)

    def norms(self) -> list[Call]:
        return [c for c in self.covered if c.op == "batch_norm" and c.covered in self._in_recipes]

    @cached_property
    def interposed_calls(self) -> dict[int, str]:
        """By number the modules of the covered calls that do not just run as plain PyTorch."""
        return {s.index: self.covered[s.index].module for s in self.steps if self._is_interposed(s)}

    def _is_interposed(self, step: Step) -> bool:
        if step.op == "add":
            return False
        changed = step.output if step.op == "relu" else step.own if step.op in OWN_MAPS else step.input
        if step.is_source or step.choice != CallChoice(step.index, step.op) or _changes(changed):
            return True
        return step.op == "max_pool2d" and step.index in self._unread[1]

    def caught_calls(self) -> list[tuple[int, str, bool]]:
        """(number of the covered call that comes next, module, whether only outputs of covered ReLUs are to be caught,
        which have a stash by then) of the uncovered calls that save something to be caught."""
        outputs = {s.output.storage for s in self.steps if s.op == "relu" and s.output and s.output.form.values}
        found, done = [], 0
        for call in self.graph.calls:
            done = max(done, call.covered + 1)
            saved = [] if call.covered >= 0 else [s.storage for s in _in_order(call)]
            caught = {s for s in saved if self.catches(s)}
            if caught:
                found.append((done, call.module, caught <= outputs))
        return found

    def origin(self, storage: int) -> tuple[str, str, tuple[int, ...]]:
        """(op, module, shape) of a storage's first saved value; blanks for -1."""
        if storage < 0:
            return "", "", ()
        known = self.graph.storages[storage]
        writers = self.graph.writers(storage)
        return (writers[-1].op, writers[-1].module, known.shape) if writers else ("input", "", known.shape)

    def _step(self, call: Call) -> Step:
        choice = self._choices.get(call.covered) or CallChoice(call.covered, call.op)
        made = self.graph.values[call.results[0]].storage if call.results else -1
        return Step(
            call.covered, call.op, choice, self.decisions.get(made), self._input(call), self._own(call),
            call.covered in self._in_recipes, made in self.sources,
        )  # fmt: skip

    def _own(self, call: Call) -> Decision | None:
        if call.op not in OWN_MAPS:
            return None
        results = {self.graph.values[i].storage for i in call.results}
        made = [s.storage for s in call.saves if self.graph.storages[s.storage].producer == call.index]
        return next((self.decisions[s] for s in made if s in self.decisions and s not in results), None)

    def _input(self, call: Call) -> Decision | None:
        saved = [s.storage for s in call.saves if s.storage in self.decisions]
        own = self.graph.values[call.operands[0]].storage if call.operands else -1
        return self.decisions[own if own in saved else saved[0]] if saved else None

    def _saves(self) -> tuple[dict[Key, tuple], dict[Key, tuple]]:
        gaps: dict[Key, dict[int, bool]] = defaultdict(dict)
        within: dict[Key, dict[int, bool]] = defaultdict(dict)
        done = 0
        for call in self.graph.calls:
            found, number = (gaps, done) if call.covered < 0 else (within, call.covered)
            if any(self._is_caught_unread(s) for s in call.saves):
                self._unread[call.covered >= 0].add(number)
            if call.covered >= 0:
                done = call.covered + 1
            for save in _in_order(call):
                if self.graph.storages[save.storage].kind in ("input", "activation"):
                    known = found[number, dtype_of(save.dtype), save.shape]
                    known[save.storage] = known.get(save.storage, False) or (type(save) is Save and save.read)
        return self._decided(gaps), self._decided(within)

    def _is_caught_unread(self, save: Save) -> bool:
        """Whether a save of which backward reads the shape alone would hold a tensor that nothing else holds."""
        if save.read or self.graph.storages[save.storage].kind == "parameter":
            return False
        return self._given or _changes(self.decisions.get(save.storage))

    def _decided(self, found: dict[Key, dict[int, bool]]) -> dict[Key, tuple]:
        return {key: tuple(self._saved(s, read) for s, read in saved.items()) for key, saved in found.items()}

    def _saved(self, storage: int, read: bool) -> Decision | None:
        """A saved storage's decision; one that may be read where no backward reads it, as its node goes at once."""
        decision = self.decisions.get(storage)
        return KEEP_DENSE if decision is not None and not read and decision.form in WITHOUT_VALUES else decision


def _changes(decision: Decision | None) -> bool:
    return decision is not None and not decision.stays


def _in_order(call: Call) -> list[Save | Passing]:
    """What a call saves, in order, with what it saves for nodes that go at once."""
    found: list[Save | Passing] = list(call.saves)
    for passing in reversed(call.passing):
        found.insert(passing.position, passing)
    return found


def _stashes(recipe: tuple) -> set[int]:
    if recipe[:1] == ("stash",):
        return {recipe[1]}
    return set().union(*(_stashes(r) for r in recipe[1:] if isinstance(r, tuple)))
