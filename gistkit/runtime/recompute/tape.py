"""The tape: writes down the calls of a plan's segments while the forward runs.

Which call of the plan's graph runs now is known by counting the calls that the function mode sees, as the recorder did.
That a storage comes back bit for bit is checked once, in each shape and dtype and on each device: a digest taken in
forward is compared when backward runs its segment anew. One that differs is a GistError; from the next forward on it is
kept as it is, under a budget a PlanError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten

from gistkit.capture import COVERED, PLAIN, bind, call_name, operands, tensors_in
from gistkit.errors import GistError, PlanError, PlanMismatchError
from gistkit.ir import Call, Decision
from gistkit.nn.autocast import LOWERED
from gistkit.nn.keep import Kept
from gistkit.nn.standin import settings
from gistkit.planning.forms import OBSERVERS, RecomputePlan, SegmentPlan
from gistkit.runtime.recompute.calls import Operand, RandomState, RecordedCall, geometry, random_state
from gistkit.runtime.recompute.replay import RecomputedBody, Segment
from gistkit.runtime.signature import autocast_now
from gistkit.runtime.stash.stash import whole
from gistkit.runtime.stash.verify import digest

Hold = Callable[[torch.Tensor, int], Kept]
Refuse = Callable[[int, str], None]
AGAIN = "plan this model again"
DIFFERS = "it does not come back bit for bit on this device"
_SURE = frozenset(("relu", "max_pool2d", "conv2d", "linear", "batch_norm", "add"))
"""Covered ops that draw no random numbers."""


@dataclass
class _Open:
    """The call running now or, where ``over``, ran last: number in the graph (-1: beyond it), saved tensors so far."""

    number: int
    op: str
    over: bool = False
    saves: int = 0
    saving: bool = False
    versions: dict[int, int] = field(default_factory=dict)
    written: list[tuple[int, RecordedCall, list[tuple[torch.Tensor, int]]]] = field(default_factory=list)
    random: tuple = ()


class Tape:
    """Writes down one forward. ``hold(x, storage)`` gives a hold on a kept storage, ``verified`` remembers by key which
    storages come back (None: nothing is checked), ``refuse(storage, why)`` hears of those that do not."""

    def __init__(self, plan: RecomputePlan, hold: Hold, verified: dict | None, refuse: Refuse) -> None:
        self._plan, self._hold, self._verified, self._refuse = plan, hold, verified, refuse
        self._segments = [Segment() for _ in plan.segments]
        self._at = 0
        self._now = _Open(-1, "")
        self._unwritten = _Open(-1, "")
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def begin(self, func: Callable, args: tuple, kwargs: dict) -> None:
        op = _name(func)
        if op in OBSERVERS:
            return
        order = self._plan.order
        number = order[self._at] if self._at < len(order) else -1
        self._at += 1
        if number not in self._plan.watched:
            self._now = now = self._unwritten
            now.number, now.over, now.saves = number, False, 0
            return
        self._now = now = _Open(number, op)
        call = self._plan.graph.calls[number]
        if now.op != call.op:
            raise PlanMismatchError(f"call {number} to be {call.op}", now.op, AGAIN)
        found = self._operands(func, args, kwargs)
        now.versions = {s: t._version for t, s in found if s in call.writes}
        segments = self._plan.of_call.get(number, ())
        if segments:
            now.random = () if now.op in _SURE else _random_states(found)
        for segment in segments:
            now.written.append(self._write(segment, func, args, kwargs, found))

    def end(self, result: Any) -> None:
        now = self._now
        for index, written, outside in now.written:
            segment = self._segments[index]
            inside = self._plan.segments[index].inside
            segment.holds += [self._hold(x, storage) for x, storage in outside]
            written.makes = self._results(result, inside)
            written.random = tuple(s for s in now.random if random_state(*s[:2]) != s[2])
            segment.calls.append(written)
        now.written.clear()
        now.over = True

    def meant(self, found: Iterable[Decision | None]) -> tuple[Decision, ...]:
        """Decisions whose storages are saved by the running call or, between calls, by a custom Function."""
        graph, now = self._plan.graph, self._now

        def fits(call: Call) -> bool:
            return call.hidden if now.over else call.index == now.number

        return tuple(d for d in found if d is not None and any(fits(c) for c, _ in graph.savers(d.storage)))

    def saving(self, pack: Callable, x: torch.Tensor) -> Any:
        now = self._now
        now.saving = True
        try:
            return pack(x)
        finally:
            now.saving = False
            now.saves += 1

    def body(self, x: torch.Tensor, decision: Decision) -> RecomputedBody | str:
        """A stand-in for x under a ``recompute`` decision, or why there is none."""
        storage, now = decision.storage, self._now
        plan = self._plan.of_storage.get(storage)
        if plan is None or now.number < 0:
            return "no call of its segment is running"
        why = self._inside(x, storage)
        if why:
            return why
        after = storage not in now.versions or x._version > now.versions[storage]
        key = ("recompute", storage, now.number, x.shape, x.stride(), x.dtype, x.device, autocast_now(), settings())
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
        self._live.clear()
        self._now = _Open(-1, "")

    def _inside(self, x: torch.Tensor, storage: int) -> str:
        """Why a storage that the running call makes inside itself cannot come back; notes how it does."""
        graph, now = self._plan.graph, self._now
        call = graph.calls[now.number]
        results = {graph.values[v].storage for v in call.results}
        if graph.storages[storage].producer != call.index or storage in results:
            return ""
        for _, written, _ in now.written:
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
        op = COVERED.get(func)
        bound = None if op is None else bind(op, func, args, kwargs)
        tensors = operands(bound) if bound is not None else [*tensors_in(args), *tensors_in(kwargs)]
        tensors = [t for t in tensors if t.layout == torch.strided and not t.is_nested]
        if len(tensors) != len(call.operands):
            raise PlanMismatchError(
                f"call {call.index} ({call.op}) to read {len(call.operands)} tensors", f"{len(tensors)}", AGAIN
            )
        return [(t, self._plan.graph.values[v].storage) for t, v in zip(tensors, call.operands, strict=True)]

    def _write(
        self, plan: SegmentPlan, func: Callable, args: tuple, kwargs: dict, found: list[tuple[torch.Tensor, int]]
    ) -> tuple[int, RecordedCall, list[tuple[torch.Tensor, int]]]:
        call = self._plan.graph.calls[self._now.number]
        known = {id(t): s for t, s in found}
        segment, outside = self._segments[plan.index], []
        without = _running_statistics(call, func, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        made: list[Any] = []
        once: dict[int, Operand] = {}
        for leaf in leaves:
            if id(leaf) in once:
                made.append(once[id(leaf)])
            elif isinstance(leaf, torch.Tensor) and id(leaf) not in without:
                storage = known.get(id(leaf), -1)
                hold = -1
                if storage in plan.inside:
                    self._check_live(leaf, storage, call.op)
                else:
                    hold = len(segment.holds) + len(outside)
                    outside.append((leaf, storage))
                once[id(leaf)] = Operand(storage, hold, geometry(leaf), leaf.dtype, leaf.requires_grad)
                made.append(once[id(leaf)])
            elif isinstance(leaf, torch.Tensor) or isinstance(leaf, PLAIN):
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
        written = RecordedCall(call.index, call.op, func, made, spec, autocast_now(), changes=changes)
        return plan.index, written, outside

    def _check_live(self, x: torch.Tensor, storage: int, op: str) -> None:
        known = self._live.get(x.untyped_storage()._cdata)
        if known is None or known[0].expired() or known[1] != storage:
            raise PlanMismatchError(f"{op} to read storage {storage} of the plan's graph", "another tensor", AGAIN)

    def _results(self, result: Any, inside: frozenset[int]) -> tuple[tuple[int, int, Any], ...]:
        graph = self._plan.graph
        call = graph.calls[self._now.number]
        tensors = list(tensors_in(result))
        made: dict[int, tuple[int, int, Any]] = {}
        for leaf, (t, value) in enumerate(zip(tensors, call.results, strict=False)):
            storage = graph.values[value].storage
            if storage in inside and graph.storages[storage].producer == call.index and storage not in made:
                made[storage] = (leaf, storage, geometry(t))
                ref = StorageWeakRef(t.untyped_storage())
                self._live[ref.cdata] = (ref, storage)
        return tuple(made.values())


@lru_cache(maxsize=1024)
def _name(func: Callable) -> str:
    return COVERED.get(func) or call_name(func)


def _random_states(found: list[tuple[torch.Tensor, int]]) -> tuple[RandomState, ...]:
    devices = {("cpu", 0)} | {("cuda", t.device.index) for t, _ in found if t.is_cuda}
    return tuple((device, index, random_state(device, index)) for device, index in sorted(devices))


def _running_statistics(call: Any, func: Callable, args: tuple, kwargs: dict) -> set[int]:
    """The arguments that a batch norm in training would update; without them it gives the same result."""
    if call.op != "batch_norm" or COVERED.get(func) != "batch_norm":
        return set()
    bound: Any = bind("batch_norm", func, args, kwargs)
    if bound is None or not bound.training:
        return set()
    return {id(t) for t in (bound.running_mean, bound.running_var) if t is not None}
