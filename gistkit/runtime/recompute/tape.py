"""The tape: writes down the calls of a plan's segments while the forward runs.

Which call of the plan's graph runs now is known by counting the calls that the function mode sees, as the recorder did.
That a storage comes back bit for bit is checked once, in each shape and dtype and on each device: a digest taken in
forward is compared when backward runs its segment anew. One that differs is a GistError; from the next forward on it is
kept as it is, under a budget a PlanError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from gistkit.capture import PLAIN, bind, op_name, operands, tensors_in
from gistkit.errors import GistError, PlanError, PlanMismatchError
from gistkit.ir import Decision
from gistkit.kernels import capturing
from gistkit.nn.autocast import LOWERED
from gistkit.nn.keep import Kept
from gistkit.nn.standin import settings
from gistkit.planning.forms import OBSERVERS, RecomputePlan, SegmentPlan
from gistkit.runtime.recompute.calls import Operand, RandomState, RecordedCall, flattened, geometry, random_state
from gistkit.runtime.recompute.replay import RecomputedBody, Segment
from gistkit.runtime.recompute.steps import HIDDEN, Recordings
from gistkit.runtime.signature import autocast_now
from gistkit.runtime.stash.stash import whole
from gistkit.runtime.stash.verify import digest

Hold = Callable[[torch.Tensor, int], Kept]
Refuse = Callable[[int, str], None]
AGAIN = "plan this model again"
DIFFERS = "it does not come back bit for bit on this device"
_name = lru_cache(maxsize=1024)(op_name)
_SURE = frozenset(("relu", "max_pool2d", "conv2d", "linear", "batch_norm", "add"))
"""Covered ops that draw no random numbers."""


class _Written(NamedTuple):
    """A call of a segment that runs now: its record, what is held for the segment once it has run, and whether the
    record is that of an earlier forward."""

    segment: SegmentPlan
    call: RecordedCall
    outside: list[tuple[torch.Tensor, int]]
    known: bool


class _Open:
    """The call that runs now or, where ``over``, ran last: its number in the graph (-1: beyond it), saved tensors so
    far, versions of what it writes to, random states and autocast before it."""

    __slots__ = ("autocast", "number", "op", "over", "random", "saves", "saving", "versions", "written")

    def __init__(self, number: int, op: str) -> None:
        self.number, self.op, self.over, self.saves, self.saving = number, op, False, 0, False
        self.versions: dict[int, int] = {}
        self.written: list[_Written] = []
        self.random: tuple[RandomState, ...] = ()
        self.autocast: Any = None


class Tape:
    """Writes down one forward. ``hold(x, storage)`` gives a hold on a kept storage, ``verified`` remembers by key which
    storages come back (None: nothing is checked), ``refuse(storage, why)`` hears of those that do not."""

    def __init__(
        self, plan: RecomputePlan, hold: Hold, verified: dict | None, refuse: Refuse, recordings: Recordings
    ) -> None:
        self.watched = plan.watched
        self._plan, self._hold, self._verified, self._refuse = plan, hold, verified, refuse
        self._recordings = recordings
        self._segments = [Segment(recordings.reruns[i]) for i in range(len(plan.segments))]
        self._at, self._most = 0, len(plan.order)
        self._in_step, self._settings = True, ()
        self._now = _Open(-1, "")
        self._unwritten = _Open(-1, "")
        self._live: dict[int, int] = {}

    def begin(self, func: Callable, args: tuple, kwargs: dict) -> None:
        op = _name(func)
        if op in OBSERVERS:
            return
        plan, at = self._plan, self._at
        number = plan.order[at] if at < self._most else -1
        self._at = at + 1
        if number not in plan.watched:
            self._in_step = self._in_step and number >= 0 and plan.graph.calls[number].op == op
            self._now = now = self._unwritten
            now.number, now.over, now.saves, now.autocast = number, False, 0, None
            return
        self._now = now = _Open(number, op)
        call = plan.graph.calls[number]
        if op != call.op:
            raise PlanMismatchError(f"call {number} to be {call.op}", op, AGAIN)
        segments, known = plan.of_call.get(number, ()), True
        if segments:
            leaves, spec = flattened(args, kwargs)
            now.autocast = autocast_now()
            for segment in segments:
                written = self._known(segment, func, leaves, spec)
                if written is None:
                    known = False
                else:
                    now.written.append(written)
                    if written.call.draws and op not in _SURE:
                        now.random = _random_states(tensors_in((args, kwargs)))
            if not known:
                return self._write_down(segments, func, args, kwargs, leaves, spec)
        if number in self._recordings.overwrites:
            now.versions = self._versions(self._operands(func, args, kwargs))

    def is_next(self, number: int, counts: bool) -> bool:
        """Whether the call of that number comes next, behind a batch norm's counter where it ``counts``."""
        at = self._at + counts
        return at < self._most and self._plan.order[at] == number

    def skipped(self, number: int, counts: bool) -> None:
        """That call, which no segment needs, has run unseen."""
        self._at += 1 + counts
        self._now = now = self._unwritten
        now.number, now.over, now.saves, now.autocast = number, True, 0, None

    def undo(self) -> None:
        """The call that has begun has not run: it begins again."""
        self._at -= 1
        self._now.written = []

    @property
    def running(self) -> int:
        """The running call's number in the graph; -1 where the calls so far have not all been the graph's."""
        return self._now.number if self._in_step else -1

    def _write_down(
        self, segments: tuple[SegmentPlan, ...], func: Callable, args: tuple, kwargs: dict, leaves: list, spec: Any
    ) -> None:
        """The running call for all of its segments, one of which does not know it."""
        now = self._now
        if now.op not in _SURE and (self._may_draw(segments) or any(w.call.draws for w in now.written)):
            now.random = _random_states(tensors_in((args, kwargs)))
        found = self._operands(func, args, kwargs)
        now.versions = self._versions(found)
        without = _running_statistics(self._plan.graph.calls[now.number], func, args, kwargs)
        storages = {id(t): s for t, s in found}
        now.written = [self._write(s, func, leaves, spec, storages, without) for s in segments]

    def _versions(self, found: Iterable[tuple[torch.Tensor, int]]) -> dict[int, int]:
        writes = self._plan.graph.calls[self._now.number].writes
        return {s: t._version for t, s in found if s in writes}

    def _known(self, plan: SegmentPlan, func: Callable, leaves: list[Any], spec: Any) -> _Written | None:
        """The running call as an earlier forward wrote it down, where it is that one again."""
        call = self._recordings.calls.get((plan.index, self._now.number))
        found = None if call is None else call.tensors(func, leaves, spec)
        if call is None or found is None or call.autocast != self._now.autocast:
            return None
        outside, holds = [], len(self._segments[plan.index].holds)
        for operand, x in found.items():
            if operand.hold < 0:
                self._check_live(x, operand.storage, call.name)
            elif operand.hold != holds:
                return None
            else:
                outside.append((x, operand.storage))
                holds += 1
        return _Written(plan, call, outside, True)

    def _may_draw(self, segments: Iterable[SegmentPlan]) -> bool:
        """Whether the running call, which an earlier forward made otherwise, must be taken to draw random numbers.
        While a CUDA graph is captured nobody can look: it does what it did before."""
        if not capturing():
            return True
        before = [self._recordings.calls.get((s.index, self._now.number)) for s in segments]
        return any(call is None or call.draws for call in before)

    def end(self, result: Any) -> None:
        now = self._now
        now.over = True
        for plan, call, outside, known in now.written:
            segment = self._segments[plan.index]
            for x, storage in outside:
                segment.holds.append(self._hold(x, storage))
            makes = self._results(result, plan.inside)
            states = now.random and tuple(s for s in now.random if random_state(*s[:2]) != s[2])
            if states:
                segment.random[call.number] = states
            if not known or makes != call.makes:
                call = replace(call, makes=makes, draws=call.draws or bool(states))
                if not any([isinstance(leaf, torch.Generator) for leaf in call.leaves]):
                    self._recordings.calls[plan.index, call.number] = call
            segment.calls.append(call)
        if now.written:
            now.written = []

    def run_again_by(self, function: Callable) -> None:
        """Have the running call run once more by that (:attr:`RecordedCall.again`)."""
        for written in self._now.written:
            written.call.again = function

    def meant(self, found: Iterable[Decision | None]) -> tuple[Decision, ...]:
        """Those of the decisions whose storages are saved by the running call or, between calls, by a custom
        Function."""
        now, saved_by = self._now, self._recordings.saved_by
        number = HIDDEN if now.over else now.number
        return tuple([d for d in found if d is not None and number in saved_by(d.storage)])

    def saving(self, pack: Callable, *given: Any) -> Any:
        now = self._now
        now.saving = True
        try:
            return pack(*given)
        finally:
            now.saving = False
            now.saves += 1

    def body(self, x: torch.Tensor, decision: Decision) -> RecomputedBody | str:
        """A stand-in for x under a ``recompute`` decision, or why there is none."""
        storage, now = decision.storage, self._now
        plan = self._plan.of_storage.get(storage)
        if plan is None or now.number < 0:
            return "no call of its segment is running"
        makes_it = self._plan.graph.storages[storage].producer == now.number
        why = self._inside(x, storage) if makes_it else ""
        if why:
            return why
        after = storage not in now.versions or x._version > now.versions[storage]
        if now.autocast is None:
            now.autocast = autocast_now()
        if not self._settings:
            self._settings = settings()
        context = now.autocast, self._settings
        key = ("recompute", storage, now.number, x.shape, x.stride(), x.dtype, x.device, context)
        known = True if self._verified is None else self._verified.get(key)
        if known is False:
            return DIFFERS
        body = self._segments[plan.index].body(storage, 2 * now.number + after, x)
        if known is None:
            body.check = self._when_back(digest(whole(x)), key, storage)
        return body

    def _when_back(self, expected: int, key: tuple, storage: int) -> Callable[[torch.Tensor], None]:
        verified, refuse = self._verified, self._refuse
        assert verified is not None

        def check(values: torch.Tensor) -> None:
            verified[key] = digest(values) == expected
            if not verified[key]:
                refuse(storage, DIFFERS)
                raise GistError(
                    f"storage {storage} did not come back bit for bit when its segment ran anew in backward; run the "
                    "step again: its next forward keeps it as it is"
                )

        return check

    def close(self) -> None:
        for segment in self._segments:
            segment.complete = True

    def clear(self) -> None:
        self._segments.clear()
        live, self._live = self._live, {}
        for address in live:
            torch.UntypedStorage._free_weak_ref(address)
        self._now = _Open(-1, "")

    def _inside(self, x: torch.Tensor, storage: int) -> str:
        """Why a storage that the running call makes inside itself cannot come back; notes how it does."""
        graph, now = self._plan.graph, self._now
        call = graph.calls[now.number]
        if storage in self._recordings.results(call.index):
            return ""
        for _, written, _, _ in now.written:
            cast = written.cast_of(x, last=now.saving) if now.op in LOWERED else -1
            if cast >= 0:
                written.casts[storage] = (cast, x.dtype)
            elif now.saving and not call.inplace:
                written.packs[now.saves] = storage
            else:
                return f"{call.op} makes it for itself"
        return "" if now.written else "its call is not one of the segment's"

    def _operands(self, func: Callable, args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, int]]:
        """The call's tensors with the graph's storages, in the recorder's order."""
        call = self._plan.graph.calls[self._now.number]
        bound = bind(func, args, kwargs)
        tensors = operands(bound) if bound is not None else [*tensors_in(args), *tensors_in(kwargs)]
        tensors = [t for t in tensors if t.layout == torch.strided and not t.is_nested]
        if len(tensors) != len(call.operands):
            raise PlanMismatchError(
                f"call {call.index} ({call.op}) to read {len(call.operands)} tensors", f"{len(tensors)}", AGAIN
            )
        return [(t, self._plan.graph.values[v].storage) for t, v in zip(tensors, call.operands, strict=True)]

    def _write(self, plan: SegmentPlan, func: Callable, leaves: list, spec: Any, known: Any, without: Any) -> _Written:
        """``known``: storages of the call's tensors by their ``id``; ``without``: ids of those that are left out."""
        call = self._plan.graph.calls[self._now.number]
        outside: list[tuple[torch.Tensor, int]] = []
        holds = len(self._segments[plan.index].holds)
        made: list[Any] = []
        once: dict[int, Operand] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in without:
                if id(leaf) not in once:
                    storage, hold = known.get(id(leaf), -1), -1
                    if storage in plan.inside:
                        self._check_live(leaf, storage, call.op)
                    else:
                        hold = holds + len(outside)
                        outside.append((leaf, storage))
                    once[id(leaf)] = Operand(storage, hold, geometry(leaf), leaf.dtype, leaf.requires_grad)
                made.append(once[id(leaf)])
            elif isinstance(leaf, (torch.Tensor, tuple, *PLAIN)):
                made.append(None if isinstance(leaf, torch.Tensor) else leaf)
            elif isinstance(leaf, torch.Generator):
                made.append(leaf.clone_state())
            else:
                raise PlanError(
                    f"storage {min(plan.storages)}: recompute runs {call.op} of {call.module or 'the model'} (call "
                    f"{call.index}) anew, whose argument of type {type(leaf).__name__} cannot be kept for that; keep "
                    "what it makes, or cut the segment behind it"
                )
        changes = tuple(s for s in call.writes if s in plan.inside and s in call.reads)
        left = frozenset(i for i, leaf in enumerate(leaves) if id(leaf) in without)
        about = call.index, call.op, func, made, spec, self._now.autocast
        return _Written(plan, RecordedCall(*about, changes=changes, without=left), outside, False)

    def _check_live(self, x: torch.Tensor, storage: int, op: str) -> None:
        if self._live.get(x.untyped_storage()._cdata) != storage:
            raise PlanMismatchError(f"{op} to read storage {storage} of the plan's graph", "another tensor", AGAIN)

    def _results(self, result: Any, inside: frozenset[int]) -> tuple[tuple[int, int, Any], ...]:
        graph = self._plan.graph
        call = graph.calls[self._now.number]
        tensors = [result] if type(result) is torch.Tensor else list(tensors_in(result))
        made: dict[int, tuple[int, int, Any]] = {}
        for leaf, (t, value) in enumerate(zip(tensors, call.results, strict=False)):
            storage = graph.values[value].storage
            if storage in inside and graph.storages[storage].producer == call.index and storage not in made:
                made[storage] = (leaf, storage, geometry(t))
                memory = t.untyped_storage()
                if memory._cdata not in self._live:  # a weak reference: no other storage gets the address meanwhile
                    memory._weak_ref()  # type: ignore[misc]
                self._live[memory._cdata] = storage
        return tuple(made.values())


def _random_states(found: Iterable[torch.Tensor]) -> tuple[RandomState, ...]:
    devices = {("cpu", 0)} | {("cuda", t.device.index) for t in found if t.is_cuda}
    return tuple((device, index, random_state(device, index)) for device, index in sorted(devices))


def _running_statistics(call: Any, func: Callable, args: tuple, kwargs: dict) -> set[int]:
    """The arguments that a batch norm in training would update; without them it gives the same result."""
    bound: Any = bind(func, args, kwargs) if call.op == "batch_norm" else None
    if bound is None or not bound.training:
        return set()
    return {id(t) for t in (bound.running_mean, bound.running_var) if t is not None}
