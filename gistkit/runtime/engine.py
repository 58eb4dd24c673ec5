"""Carries plans out: one engine per compressed model.

The first training forward of a new signature (dtypes, devices, ranks, what needs gradients, autocast; not sizes) is
captured on a copy with fake tensors and planned; where fake tensors cannot go, the first real step runs as plain
PyTorch and is recorded. Every later forward runs in a region under that plan. Measured densities flow back into the
policy during the first steps, as Gist watches the sparsity of its first 200 minibatches (section IV-A).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from gistkit.capture import Recorder, capture, hooks_are_active
from gistkit.errors import CaptureError, PlanMismatchError
from gistkit.ir import Plan, SavedGraph, SavedStorage
from gistkit.planning.policies import gist
from gistkit.runtime.calls.fast_modules import ShortModules
from gistkit.runtime.calls.interpose import Interposer
from gistkit.runtime.calls.plain import Counter, as_captured, runs_plain
from gistkit.runtime.calls.uncovered import hooks
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.density_excess import Room, remember
from gistkit.runtime.program.match_plan import check_mode, check_rows, given_program, plans_training
from gistkit.runtime.program.pending_backwards import Earlier
from gistkit.runtime.program.program import Program
from gistkit.runtime.program.settings import Settings
from gistkit.runtime.program.sizes import Sizes
from gistkit.runtime.program.stats import Observed, StepStats, observe
from gistkit.runtime.rebuild.probed import told_ahead
from gistkit.runtime.signature import signature, state_kinds
from gistkit.runtime.sparse_sizes.counts import Ticket
from gistkit.runtime.sparse_sizes.exact import FIRST, PLANNED, ExactPacker
from gistkit.runtime.sparse_sizes.forecast import Forecasts, Spilled, spilled_note
from gistkit.runtime.sparse_sizes.spill import Spill

REPLAN_AFTER = frozenset((1, 2, 5, 10, 20, 50, 100, 200))
REPLAN_EVERY = 1000
# How many sparse encodings of which no earlier step tells the size the host may be ahead of the device before it waits
# for the oldest of them. Without a bound, a host that enqueues a whole forward at once would leave every scratch of
# that forward alive, and nothing would be saved.
LAG = 4
# How many plans a model may have before numbers and texts among its arguments no longer tell signatures apart.
PLANS = 16
# How many rebuilds may be known to be exact, one a layer and size, before all are forgotten and checked anew.
CHECKS = 4096


def run_inside(region: Region, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """Call the forward with the region's function mode and saved-tensor hooks around it."""
    pack, unpack = hooks(region)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), Interposer(region, pack):
        return forward(*args, **kwargs)


def _moves(plan: Plan) -> tuple:
    """What a plan does, whatever its reasons: they name densities, which change at every step."""
    return tuple(replace(d, reason="") for d in plan.decisions), plan.choices


def _foreign() -> str:
    """What is in force here that leaves no room for a region's own hooks; empty where nothing is."""
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) was active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation was active"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "saved-tensor hooks were disabled"
    return "other saved-tensor hooks were active" if hooks_are_active() else ""


class Engine:
    """Plans, regions and statistics of one compressed model; ``plan`` is None where it makes its own."""

    def __init__(self, settings: Settings, plan: Plan | None = None) -> None:
        self.settings = settings
        self.plan = plan
        self._stats: StepStats | Observed | None = None
        self.steps = 0
        self.notes: list[str] = []
        self.moved: dict[int, int] = {}
        self._programs: dict[tuple, Program] = {}
        self._densities: dict[tuple, dict[int, float]] = {}
        self._verified: dict = {}
        self._short = ShortModules()
        self._packer = ExactPacker(lag=LAG, bounded=True, spill=Spill())
        self._spilled: dict[int, Spilled] = {}
        self._probes: list[tuple[tuple, int, int, Ticket]] = []
        self._lock = threading.RLock()
        self._overwrites = True
        self._warned = False
        self._sizes = None if plan is None or plan.budget_bytes is None else Sizes(plan, self.notes)
        self._earlier = None if plan is None or plan.budget_bytes is None else Earlier(plan)

    @property
    def stats(self) -> StepStats | None:
        """What the last step kept; None before the first."""
        if isinstance(self._stats, Observed):
            self._stats = self._stats.stats()
        return self._stats

    @property
    def densities(self) -> dict[int, float]:
        """Shares of non-zero elements that the steps so far have measured, the last figure of each storage."""
        self._packer.listen()
        return {s: share for found in list(self._densities.values()) for s, share in found.copy().items()}

    @property
    def all_notes(self) -> list[str]:
        """``notes``, and what the last step found about its sparse storages: whether the host had to wait for their
        sizes, though earlier steps told them, and which were larger than those."""
        self._packer.listen()
        waits = {why: times for why, times in self._packer.waits.items() if why not in (FIRST, PLANNED)}
        found = [f"the host waited for the device {times} times so far: {why}" for why, times in waits.items()]
        return [*self.notes, *found, *filter(None, [spilled_note(self._spilled, self.steps)])]

    @property
    def storages(self) -> dict[int, SavedStorage]:
        """Every storage as it was captured."""
        return {s.id: s for program in self._programs.values() for s in program.graph.storages}

    def run(self, model: torch.nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """One forward of the model: compressed with gradients on in training, or in the mode that a given plan was made
        in; untouched otherwise."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.plan is not None:
            check_mode(self.plan, model.training)
        if not model.training and plans_training(self.plan):
            return forward(*args, **kwargs)
        foreign = _foreign()
        if foreign and self.plan is not None and self.plan.budget_bytes is not None:
            remedy = "leave that first: around a forward it would run as plain PyTorch, whatever the budget"
            raise PlanMismatchError("a forward by itself, for the plan's budget", foreign, remedy)
        if foreign:
            self._note(f"{foreign} around a forward: it ran as plain PyTorch")
            return forward(*args, **kwargs)
        rows = 0 if self.plan is None else check_rows(self.plan, args, kwargs)
        key = self._key(model, args, kwargs)
        with self._lock:
            program = self._program(key, model, args, kwargs)
        if program is None:
            return self._recorded(key, model, forward, args, kwargs)
        if self._earlier is not None:
            self._earlier.begin(rows)
        plain = runs_plain(program.plan)
        run = partial(self._plain, program) if plain else partial(self._compressed, key, program, model)
        out, observed = run(forward, args, kwargs)
        if self._earlier is not None:
            self._earlier.follow(observed, out, rows)
        return out

    def _program(self, key: tuple, model: torch.nn.Module, args: tuple, kwargs: dict) -> Program | None:
        """What a forward is run by; None where it has to be recorded first."""
        known = self._programs.get(key)
        if self._sizes is None or self.plan is None:
            return known or self._planned(key, model, args, kwargs)
        own, found = self._sizes.programs(key, known, model, args, kwargs)
        self._programs[key] = own
        return found

    def _key(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple:
        state = () if self.plan is None else (state_kinds(model),)
        key = (*signature(model, args, kwargs), *state)
        few = key in self._programs or len(self._programs) < PLANS
        return key if few else (*signature(model, args, kwargs, ()), *state)

    def _planned(self, key: tuple, model: torch.nn.Module, args: tuple, kwargs: dict) -> Program | None:
        if self.plan is not None:
            self._programs[key] = program = given_program(self.plan, model, args, kwargs)
            return program
        try:
            graph = capture(model, args, kwargs)
        except CaptureError as error:
            self._note(f"{error}; its first step ran as plain PyTorch and was recorded")
            return None
        return self._install(key, graph)

    def _install(self, key: tuple, graph: SavedGraph) -> Program:
        densities = self._densities.setdefault(key, {})
        plan = gist(graph, lossy=self.settings.lossy, densities=densities)
        known = self._programs.get(key)
        if known is None or known.graph is not graph:
            self._programs[key] = Program(graph, plan)
        elif _moves(known.plan) != _moves(plan):
            self._programs[key] = program = Program(graph, plan)
            program.carry_over(known)
        return self._programs[key]  # with what its calls have learnt

    def _recorded(self, key: tuple, model: torch.nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        with Recorder(model) as recorder:
            out = forward(*args, **kwargs)
        graph = recorder.finish(out)
        with self._lock:
            known = {s.id: s.density for s in graph.storages if s.density is not None}
            self._densities.setdefault(key, {}).update(known)
            program = self._install(key, graph)
        plain, notes = graph.kept_bytes, ("recorded: this step ran as plain PyTorch",)
        self._stats = StepStats((), plain, program.plan.kept_bytes, plain, notes)
        return out

    def _plain(self, program: Program, forward: Callable, args: tuple, kwargs: dict) -> tuple[Any, Observed]:
        region = Region(self.settings, self._packer, program, strict=True)
        with Counter(region):
            out = forward(*args, **kwargs)
        region.finish()
        with self._lock:
            self._stats, self.steps = as_captured(program), self.steps + 1
            return out, self._stats

    def _compressed(
        self, key: tuple, program: Program, model: torch.nn.Module, forward: Callable, args: tuple, kwargs: dict
    ) -> tuple[Any, Observed]:
        if len(self._verified) > CHECKS:
            self._verified.clear()
        region = Region(self.settings, self._packer, program, self.plan is not None, self._verified)
        region.probing, region.overwrites = self._replans_next(), self._overwrites
        if not region.probing:
            region.fast = program.fast
        shares = self._densities.setdefault(key, {})
        learn = partial(remember, shares, plan=self.plan)
        if self.plan is not None and self.plan.budget_bytes is not None:
            region.bound = True
            told_ahead(self._verified, program, args, kwargs)
            told = Forecasts({}, learn, self._spilled, self.steps + 1)
            region.room = Room(self.plan, program.graph, region.densities, region.notes, told)
        else:
            self._packer.hear()
            region.forecasts = Forecasts(shares, learn, self._spilled, self.steps + 1)
        try:
            opened = self._short.open(model, program) if region.fast else []
            try:
                out = run_inside(region, forward, args, kwargs)
            finally:
                self._short.close(opened)
            region.finish()
            if region.bound:  # packing takes memory beside the scratch, which a budget counts with the next encoding
                self._packer.listen()
            else:
                self._packer.settle_first()
                self._packer.poll()
            self._stats = observed = observe(region)
            self._learn(key, program, region)
            return out, observed
        finally:
            self._overwrites &= not region.watch.broken
            region.clear()

    def _replans_next(self) -> bool:
        step = self.steps + 1
        return self.plan is None and (step in REPLAN_AFTER or step % REPLAN_EVERY == 0)

    def _learn(self, key: tuple, program: Program, region: Region) -> None:
        """Take the step's densities in; plan anew after some steps, or where the forward left its plan."""
        with self._lock:
            replan, self.steps = self._replans_next(), self.steps + 1
            densities = self._densities.setdefault(key, {})
            remember(densities, region.measured(), self.plan)
            if region.room is not None:
                self.moved |= {d.storage: d.measured_bytes for d in region.room.moved}
                self._warned = self._warned or region.room.warn()
            self._probes.extend((key, *probe) for probe in region.probes)
            self._read_probes()
            if region.diverged:
                self._programs.pop(key, None)
            elif replan and self._programs.get(key) is program:
                self._install(key, program.graph)

    def _read_probes(self) -> None:
        """Take in the counts that have arrived, from this step or an earlier one."""
        left = []
        for key, storage, n, ticket in self._probes:
            count = ticket.ready()
            if count is None:
                left.append((key, storage, n, ticket))
            else:
                self._densities.setdefault(key, {})[storage] = count / max(n, 1)
        self._probes = left

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
