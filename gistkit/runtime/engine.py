"""Carries plans out: one engine per compressed model.

The first training forward of a new kind (dtypes, devices, ranks, autocast; not sizes) is captured on a copy with fake
tensors and planned; where fake tensors cannot go, the first real step runs as plain PyTorch and is recorded. Measured
densities flow back into the policy, as Gist watches the sparsity of its first 200 minibatches (section IV-A).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from gistkit.capture import Recorder, capture
from gistkit.errors import CaptureError, PlanMismatchError
from gistkit.formats import AUTO
from gistkit.ir import Plan, SavedGraph, SavedStorage
from gistkit.kernels import capturing
from gistkit.planning.policies import gist
from gistkit.runtime.announced import announced
from gistkit.runtime.assign import Formats
from gistkit.runtime.calls.interpose import Counter, interposed
from gistkit.runtime.calls.sites import Sites
from gistkit.runtime.forward.journey import Journey
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.offload.offloader import Offloader
from gistkit.runtime.program.budget_warnings import PendingBackwards, denser, remember, warn_of_excess
from gistkit.runtime.program.match_plan import (
    Shapes,
    check_capture,
    check_mode,
    check_rows,
    given_program,
    shapes,
)
from gistkit.runtime.program.program import Program, Settings
from gistkit.runtime.program.stats import Observed, StepStats, as_captured, observe
from gistkit.runtime.rebuild.arithmetic import probe_ahead
from gistkit.runtime.recompute.modules import run_anew
from gistkit.runtime.signature import foreign_context, signature, state_kinds
from gistkit.runtime.sparse_sizes.exact import FIRST, PLANNED, ExactPacker, Forecasts
from gistkit.runtime.sparse_sizes.spill import Spill

REPLAN_AFTER = frozenset((1, 2, 5, 10, 20, 50, 100, 200))
REPLAN_EVERY = 1000
# How many sparse encodings of unknown size the host may be ahead of the device before it waits for the oldest. Without
# a bound, a host that enqueues a whole forward at once would leave every scratch alive, and nothing would be saved.
LAG = 4
PLANS = 16  # beyond so many, numbers and texts among the arguments no longer tell kinds of forwards apart
CHANGES = 8  # times that a kind of forwards leaves its plan and is captured anew; from then on at the 16th, 32nd ...
SIZES = 64  # so many sizes of forwards under a budget are remembered before all are forgotten
CHECKS = 4096  # so many rebuilds are known to be exact, one a layer and size, before all are forgotten
PARAMETERS_EVERY = 100  # steps after which a model is gone through for new parameters
_needs_gradient = attrgetter("requires_grad")


def _moves(plan: Plan) -> tuple:
    return tuple(replace(d, reason="") for d in plan.decisions), plan.choices


class Engine:
    """Plans, forwards and statistics of one compressed model; ``plan`` is None where it makes its own."""

    def __init__(self, settings: Settings, plan: Plan | None = None) -> None:
        self.settings = settings
        self.plan = plan
        self._stats: StepStats | Observed | None = None
        self.steps = 0
        self.notes: list[str] = []
        self._programs: dict[tuple, Program] = {}
        self._sites: dict[tuple, Sites] = {}
        self._densities: dict[tuple, dict[int, float]] = {}
        self._formats = Formats(settings)
        self._states: dict[tuple, int] = {}
        self._changes: dict[tuple, int] = {}
        self._verified: dict = {}
        self._packer = ExactPacker(lag=LAG, bounded=True, spill=Spill())
        self._offloads: dict[torch.device, Offloader] = {}
        self._lock = threading.RLock()
        self._warned = False
        self._parameters: list[torch.nn.Parameter] = []
        self._spares_host = settings.min_gain > 0
        self._budget = budget = None if plan is None else plan.budget
        self._sized: dict[tuple[tuple, Shapes], Program] = {}
        self._earlier = PendingBackwards(plan, budget) if plan is not None and budget is not None else None

    @property
    def stats(self) -> StepStats | None:
        """What the last step kept; None before the first."""
        if isinstance(self._stats, Observed):
            self._stats = self._stats.stats()
        return self._stats

    @property
    def densities(self) -> dict[int, float]:
        """Shares of non-zero elements measured so far, the last figure of each storage."""
        self._packer.listen()
        return {s: share for found in list(self._densities.values()) for s, share in found.copy().items()}

    @property
    def all_notes(self) -> list[str]:
        """``notes``, and of sparse storages how often the host waited for a size, or one was larger than forecast."""
        self._packer.listen()
        waits = {why: times for why, times in self._packer.waits.items() if why not in (FIRST, PLANNED)}
        found = [f"the host waited for the device {times} times so far: {why}" for why, times in waits.items()]
        if self._packer.beyond:
            found.append(
                f"{self._packer.beyond} sparse encodings so far were denser than the steps before; what was beyond a "
                "forecast was in the host's memory until it was used, which is slower, not wrong"
            )
        return [*self.notes, *self._formats.notes, *found]

    @property
    def storages(self) -> dict[int, SavedStorage]:
        return {s.id: s for program in self._programs.values() for s in program.graph.storages}

    def run(self, model: torch.nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """One forward of the model: compressed in the mode that is planned for with gradients on, else untouched."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.plan is not None:
            check_mode(self.plan, model.training)
        if not model.training and (self.plan is None or self.plan.contract.training):
            return forward(*args, **kwargs)
        foreign = foreign_context()
        if foreign and self._budget is not None:
            remedy = "leave that first: around a forward it would run as plain PyTorch, whatever the budget"
            raise PlanMismatchError("a forward by itself, for the plan's budget", foreign, remedy)
        if foreign:
            self._note(f"{foreign} around a forward: it ran as plain PyTorch")
            return forward(*args, **kwargs)
        if self.plan is not None:
            check_rows(self.plan, args, kwargs)
        key = self._key(model, args, kwargs)
        if capturing():
            check_capture(self.plan, key in self._programs)
        if key in self._programs:
            return self._step(key, model, forward, args, kwargs)
        with announced(f"gistkit captures, plans and checks the first step of {type(model).__name__}"):
            return self._step(key, model, forward, args, kwargs)

    def _step(self, key: tuple, model: torch.nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        with self._lock:
            program = self._program(key, model, args, kwargs)
        if program is None:
            return self._recorded(key, model, forward, args, kwargs)
        if self.plan is None and not self._gains(program):
            if not (program.may_gain_zeros and self._replans_next()):
                return self._untouched(program, forward, args, kwargs)
        if self._earlier is not None:
            self._earlier.peak.begins(model, (args, kwargs))
        runs_plain = program.runs_plain
        run = partial(self._plain, program, model) if runs_plain else partial(self._compressed, key, program, model)
        out, observed = run(forward, args, kwargs)
        if self._earlier is not None:
            self._earlier.follow(observed, out)
        return out

    def _key(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple:
        if self.plan is None:  # which parameters need a gradient, a byte each; the hash of bytes is kept with them
            if self.steps % PARAMETERS_EVERY == 0 or not self._parameters:
                self._parameters = list(model.parameters())
            state = bytes(map(_needs_gradient, self._parameters))
        else:  # a number, as keys are looked up several times
            state = self._states.setdefault(state_kinds(model), len(self._states))
        key = (*signature(args, kwargs), state)
        few = key in self._programs or len(self._programs) < PLANS
        return key if few else (*signature(args, kwargs, ()), state)

    def _program(self, key: tuple, model: torch.nn.Module, args: tuple, kwargs: dict) -> Program | None:
        if self.plan is not None and self._budget is not None:
            # what PyTorch's own ops save is known by its shape, so other sizes are captured for themselves
            size = key, shapes(args, kwargs)
            if size not in self._sized:
                if len(self._sized) >= SIZES:
                    self._sized.clear()
                self._sized[size] = given_program(self.plan, model, args, kwargs)
            program = self._programs[key] = self._sized[size]
            return program
        known = self._programs.get(key)
        if known is not None and capturing():
            return known
        if known is not None and not known.is_stale:
            again = self.plan is None and self._formats.renew(known.graph, model, (args, kwargs), self.steps)
            return self._install(key, known.graph) if again else known
        if self.plan is not None:
            self._programs[key] = program = given_program(self.plan, model, args, kwargs)
            return program
        try:
            graph = capture(model, args, kwargs)
        except CaptureError as error:
            if self.settings.lossy == AUTO:
                raise CaptureError(f'{error}; lossy="auto" measures steps of this model: name a format') from error
            self._note(f"{error}; its first step ran as plain PyTorch and was recorded")
            return None
        self._formats.renew(graph, model, (args, kwargs), self.steps)
        return self._install(key, graph)

    def _install(self, key: tuple, graph: SavedGraph) -> Program:
        """Plan by the densities known so far; a program that would do the same stays."""
        densities = self._densities.setdefault(key, {})
        lossy, sparse = self._formats.of(graph), self.settings.sparse
        plan = gist(graph, lossy=lossy, densities=densities, sparse=sparse, spares_host=self._spares_host)
        known = self._programs.get(key)
        if known is None or known.graph is not graph or _moves(known.plan) != _moves(plan):
            self._programs[key] = Program(graph, plan)
            self._sites.pop(key, None)
        return self._programs[key]

    def replayed(self) -> None:
        """Steps are to be replayed as a CUDA graph, where encodings too small for the host's time cost none of it."""
        with self._lock:
            self._spares_host = False
            for key, program in [] if self.plan is not None else list(self._programs.items()):
                self._install(key, program.graph)

    def _gains(self, program: Program) -> bool:
        plan = program.plan
        return plan.plain_bytes - plan.kept_bytes > self.settings.min_gain * plan.plain_bytes

    def _untouched(self, program: Program, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if not isinstance(self._stats, Observed) or self._stats.program is not program:
            plan = program.plan
            gain = (plan.plain_bytes - plan.kept_bytes) / max(plan.plain_bytes, 1)
            self._note(
                f"a plan would keep {gain:.1%} less than plain PyTorch, at most the {self.settings.min_gain:.0%} of "
                "compress(min_gain=): the model's own forward runs, untouched"
            )
            self._stats = as_captured(program)
        self.steps += 1
        return forward(*args, **kwargs)

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

    def _plain(
        self, program: Program, model: torch.nn.Module, forward: Callable, args: tuple, kwargs: dict
    ) -> tuple[Any, Observed]:
        if program.plan.modules:
            with run_anew(model, program.plan.modules, program.modules):
                out = forward(*args, **kwargs)
        else:
            state = ForwardState(self.settings, self._packer, program, strict=True)
            with Counter(state):
                out = forward(*args, **kwargs)
            state.finish()
        with self._lock:
            self._stats, self.steps = as_captured(program), self.steps + 1
            return out, self._stats

    def _compressed(
        self, key: tuple, program: Program, model: torch.nn.Module, forward: Callable, args: tuple, kwargs: dict
    ) -> tuple[Any, Observed]:
        if len(self._verified) > CHECKS:
            self._verified.clear()
        state = ForwardState(self.settings, self._packer, program, self.plan is not None, self._verified)
        self._prepare(state, key, args, kwargs)
        try:
            with self._interposed(state, key, model):
                out = forward(*args, **kwargs)
            state.finish()
            if state.bound:  # packing takes memory beside the scratch, which a budget counts with the next encoding
                self._packer.listen()
            else:
                self._packer.settle_first()
                self._packer.poll()
            self._stats = observed = observe(state)
            self._learn(key, program, state)
            return out, observed
        finally:
            state.clear()

    def _prepare(self, state: ForwardState, key: tuple, args: tuple, kwargs: dict) -> None:
        program: Any = state.program
        if program.times is not None:
            state.journey = Journey(program.times, self._offloads)
        state.probing = self._replans_next()
        known = self._densities.setdefault(key, {})
        self._packer.listen()
        if self._budget is not None:
            state.bound, known = True, {}  # arrays for a forecast take more than planned
            probe_ahead(self._verified, program, args, kwargs)
        learn = partial(remember, self._densities[key], plan=self.plan)
        state.forecasts = Forecasts(known, learn)

    def _interposed(self, state: ForwardState, key: tuple, model: torch.nn.Module) -> Any:
        """All calls where zeros are counted or a custom Function saves what is to be caught, else the sites alone."""
        program: Any = state.program
        if state.probing or program.catches_functions:
            return interposed(state)
        sites = self._sites.get(key)
        if sites is None or sites.program is not program:
            sites = self._sites[key] = Sites(model, program, state.strict or state.tape is not None)
        return sites.interposed(state)

    def _replans_next(self) -> bool:
        if capturing():
            return False
        step = self.steps + 1
        return self.plan is None and (step in REPLAN_AFTER or step % REPLAN_EVERY == 0)

    def _learn(self, key: tuple, program: Program, state: ForwardState) -> None:
        with self._lock:
            replan, self.steps = self._replans_next(), self.steps + 1
            densities = self._densities.setdefault(key, {})
            remember(densities, state.measured(), self.plan)
            for text in state.remarks:
                self._note(text)
            if self.plan is not None and self._budget is not None and not self._warned:
                found = denser(self.plan, densities, {s.id: s for s in program.graph.storages})
                self._warned = warn_of_excess(found, self._budget)
                if self._warned and self._earlier is not None:
                    self._earlier.peak.rests()
            if state.diverged:
                self._changes[key] = times = self._changes.get(key, 0) + 1
                if times <= CHANGES or times.bit_count() == 1:
                    self._programs.pop(key, None)
                else:
                    self._note("its forwards keep leaving their plan: from now on few of those are captured anew")
            elif replan and self._programs.get(key) is program:
                self._install(key, program.graph)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
