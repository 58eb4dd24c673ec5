"""The tape: writes down the calls of a plan's segments while the forward runs.

Which call of the plan's graph runs now is known by counting the calls that the function mode sees, as the recorder did.
That a storage comes back bit for bit is checked once, in each shape and dtype and on each device: a digest taken in
forward is compared when backward runs its segment anew. One that differs is a GistError; from the next forward on it is
kept as it is, under a budget a PlanError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from gistkit.capture import op_name, tensors_in
from gistkit.errors import GistError, PlanMismatchError
from gistkit.ir import Decision
from gistkit.nn.autocast import LOWERED
from gistkit.nn.keep import Kept
from gistkit.nn.standin import settings
from gistkit.planning.forms import OBSERVERS, RecomputePlan
from gistkit.runtime.recompute.calls import random_state
from gistkit.runtime.recompute.replay import RecomputedBody, Segment
from gistkit.runtime.recompute.steps import HIDDEN, Recordings
from gistkit.runtime.recompute.writing import AGAIN, OpenCall, Other, Writer
from gistkit.runtime.signature import autocast_now
from gistkit.runtime.stash.stash import whole
from gistkit.runtime.stash.verify import digest

Hold = Callable[[torch.Tensor, int], Kept]
Refuse = Callable[[int, str], None]
DIFFERS = "it does not come back bit for bit on this device"
_name = lru_cache(maxsize=1024)(op_name)


class Tape:
    """Writes down one forward. ``hold(x, storage)`` gives a hold on a kept storage, ``verified`` remembers by key which
    storages come back (None: nothing is checked), ``refuse(storage, why)`` hears of those that do not."""

    def __init__(
        self, plan: RecomputePlan, hold: Hold, verified: dict | None, refuse: Refuse, other: Other,
        recordings: Recordings,
    ) -> None:  # fmt: skip
        self.watched = plan.watched
        self._plan, self._hold, self._verified, self._refuse = plan, hold, verified, refuse
        self._recordings = recordings
        self._segments = [Segment(recordings.reruns[i]) for i in range(len(plan.segments))]
        self._at, self._most = 0, len(plan.order)
        self._in_step, self._settings = True, ()
        self._now = OpenCall(-1, "")
        self._unwritten = OpenCall(-1, "")
        self._left_out = set[int]()
        self._writer = Writer(plan, recordings, self._segments, other, self._left_out)

    def begin(self, func: Callable, args: tuple, kwargs: dict) -> None:
        op = _name(func)
        if op in OBSERVERS:
            return
        plan, at = self._plan, self._at
        if at < self._most and plan.ops[at] == op:
            number, self._at = plan.order[at], at + 1
        else:
            number = self._number(op, list(tensors_in((args, kwargs))))
        calls = plan.graph.calls
        if number not in self.watched:
            if number >= 0:
                self._in_step = self._in_step and calls[number].op == op
            self._now = now = self._unwritten
            now.number, now.over, now.saves, now.autocast = number, False, 0, None
            return
        self._now = now = OpenCall(number, op)
        expected = calls[number].op
        if op != expected:
            raise PlanMismatchError(f"call {number} to be {expected}", op, AGAIN)
        self._writer.begin(now, func, args, kwargs)

    def _number(self, op: str, tensors: list[torch.Tensor]) -> int:
        """The number of a call that is not the next one planned, or may not be; -1 for one that the plan does not have.
        Of what needs no gradient a model may make other calls than on the plan's fake tensors, or leave some out: those
        of transformers look for padding, and make no mask where it would hide nothing."""
        plan, trained = self._plan, any(t.requires_grad for t in tensors)
        for at in range(self._at, self._most):
            number = plan.order[at]
            if self._is(at, op, tensors, trained):
                passed = zip(plan.order[self._at : at], plan.ops[self._at : at], strict=True)
                self._left_out.update(s for n, name in passed if not name for s in plan.graph.calls[n].writes)
                self._at = at + 1
                return number
            if plan.ops[at] and (number in self.watched or not trained):
                break
        if self._at >= self._most:
            self._in_step = False
        elif trained:
            self._at += 1
            return plan.order[self._at - 1]
        return -1

    def _is(self, at: int, op: str, tensors: list[torch.Tensor], trained: bool) -> bool:
        """Whether such a call on such tensors may be the plan's at that place; where none needs a gradient many are of
        one op."""
        if trained and self._plan.ops[at]:
            return self._plan.ops[at] == op
        values, call = self._plan.graph.values, self._plan.graph.calls[self._plan.order[at]]
        planned = [(values[v].dtype, len(values[v].shape)) for v in call.operands]
        given = [(str(t.dtype).removeprefix("torch."), t.dim()) for t in tensors]
        return call.op == op and sorted(planned) == sorted(given)

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

    def end(self, result: Any) -> None:
        now = self._now
        now.over = True
        for plan, call, outside, known in now.written:
            segment = self._segments[plan.index]
            for x, storage in outside:
                segment.holds.append(self._hold(x, storage))
            if known and not now.random and self._writer.made_again(call, result):
                segment.calls.append(call)
                continue
            makes = self._writer.results(now, result, plan.inside)
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
        known = None if self._verified is None else self._verified.get(key)
        if known is False:
            return DIFFERS
        if not (known or makes_it or self._writer.is_live(x, storage)):
            return "what is saved is another tensor, as a copy that an operator makes for itself"
        body = RecomputedBody(self._segments[plan.index], storage, 2 * now.number + after, x)
        if known is None and self._verified is not None:
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
        self._writer.clear()
        self._now = OpenCall(-1, "")

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
