"""The calls of a plan's segments, written down as :class:`RecordedCall` while the forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from gistkit.capture import PLAIN, bind, operands, tensors_in
from gistkit.errors import PlanError, PlanMismatchError
from gistkit.kernels import capturing
from gistkit.planning.forms import RecomputePlan, SegmentPlan
from gistkit.runtime.recompute.calls import Operand, RandomState, RecordedCall, flattened, geometry, random_states
from gistkit.runtime.recompute.replay import Segment
from gistkit.runtime.recompute.steps import Recordings
from gistkit.runtime.signature import autocast_now

AGAIN = (
    "plan this model again, or call it as planned: some go by their inputs' values, as those of transformers leave out "
    "an attention mask that hides nothing"
)
_SURE = frozenset(("relu", "max_pool2d", "conv2d", "linear", "batch_norm", "add"))
"""Covered ops that draw no random numbers."""


Other = Callable[[torch.Tensor, int, str, bool], None]
"""Told the tensor that a call reads in place of a storage of the graph, that storage, the call's op, and whether it
writes to it; raises where the tensor cannot be held for the segment."""


class Written(NamedTuple):
    """A call of a segment that runs now: its record, what is held for the segment once it has run, and whether the
    record is that of an earlier forward."""

    segment: SegmentPlan
    call: RecordedCall
    outside: list[tuple[torch.Tensor, int]]
    known: bool


class OpenCall:
    """The call that runs now or, where ``over``, ran last: its number in the graph (-1: beyond it), saved tensors so
    far, versions of what it writes to, random states and autocast before it."""

    __slots__ = ("autocast", "number", "op", "over", "random", "saves", "saving", "versions", "written")

    def __init__(self, number: int, op: str) -> None:
        self.number, self.op, self.over, self.saves, self.saving = number, op, False, 0, False
        self.versions: dict[int, int] = {}
        self.written: list[Written] = []
        self.random: tuple[RandomState, ...] = ()
        self.autocast: Any = None


class Writer:
    """Writes down the calls of one forward, each of which is ``now`` while it runs. ``other`` hears of operands that
    are not the tensors that their segments have made; ``left_out``: storages whose calls this forward has left out."""

    def __init__(
        self, plan: RecomputePlan, recordings: Recordings, segments: list[Segment], other: Other, left_out: set[int]
    ) -> None:
        self._plan, self._recordings, self._segments, self._other = plan, recordings, segments, other
        self._left_out = left_out
        self._live: dict[int, int] = {}

    def begin(self, now: OpenCall, func: Callable, args: tuple, kwargs: dict) -> None:
        """The call for all segments that need it."""
        segments, known = self._plan.of_call.get(now.number, ()), True
        if segments:
            leaves, spec = flattened(args, kwargs)
            now.autocast = autocast_now()
            for segment in segments:
                written = self._known(now, segment, func, leaves, spec)
                if written is None:
                    known = False
                else:
                    now.written.append(written)
                    if written.call.draws and now.op not in _SURE:
                        now.random = random_states(tensors_in((args, kwargs)))
            if not known:
                return self._write_down(now, segments, func, args, kwargs, leaves, spec)
        if now.number in self._recordings.overwrites:
            now.versions = self._versions(now, self._operands(now, func, args, kwargs))

    def results(self, now: OpenCall, result: Any, inside: frozenset[int]) -> tuple[tuple[int, int, Any], ...]:
        """What the call has made of the storages ``inside`` a segment (:attr:`RecordedCall.makes`)."""
        graph = self._plan.graph
        call = graph.calls[now.number]
        tensors = [result] if type(result) is torch.Tensor else list(tensors_in(result))
        made: dict[int, tuple[int, int, Any]] = {}
        for leaf, (t, value) in enumerate(zip(tensors, call.results, strict=False)):
            storage = graph.values[value].storage
            if storage in inside and graph.storages[storage].producer == call.index and storage not in made:
                made[storage] = (leaf, storage, geometry(t))
                self._note(t, storage)
        return tuple(made.values())

    def made_again(self, call: RecordedCall, result: Any) -> bool:
        """Whether a call that is known has made what it made before: most often one tensor, or nothing of a segment."""
        makes = call.makes
        if type(result) is not torch.Tensor or len(makes) > 1:
            return False
        for leaf, storage, (shape, stride, offset) in makes:
            if leaf or result.shape != shape or result.stride() != stride or result.storage_offset() != offset:
                return False
            self._note(result, storage)
        return True

    def _note(self, t: torch.Tensor, storage: int) -> None:
        memory = t.untyped_storage()
        address = memory._cdata
        if address not in self._live:  # a weak reference: no other storage gets the address meanwhile
            memory._weak_ref()  # type: ignore[misc]
        self._live[address] = storage

    def is_live(self, x: torch.Tensor, storage: int) -> bool:
        """Whether x lies on what a call of the segments has made of a storage of the graph."""
        return self._live.get(x.untyped_storage()._cdata) == storage

    def clear(self) -> None:
        live, self._live = self._live, {}
        for address in live:
            torch.UntypedStorage._free_weak_ref(address)

    def _write_down(
        self, now: OpenCall, segments: tuple[SegmentPlan, ...], func: Callable, args: tuple, kwargs: dict, leaves: list,
        spec: Any,
    ) -> None:  # fmt: skip
        """The running call for all of its segments, one of which does not know it."""
        if now.op not in _SURE and (self._may_draw(now, segments) or any(w.call.draws for w in now.written)):
            now.random = random_states(tensors_in((args, kwargs)))
        found = self._operands(now, func, args, kwargs)
        now.versions = self._versions(now, found)
        without = _running_statistics(self._plan.graph.calls[now.number], func, args, kwargs)
        storages = {id(t): s for t, s in found}
        now.written = [self._write(now, s, func, leaves, spec, storages, without) for s in segments]

    def _versions(self, now: OpenCall, found: Iterable[tuple[torch.Tensor, int]]) -> dict[int, int]:
        writes = self._plan.graph.calls[now.number].writes
        return {s: t._version for t, s in found if s in writes}

    def _known(self, now: OpenCall, plan: SegmentPlan, func: Callable, leaves: list[Any], spec: Any) -> Written | None:
        """The running call as an earlier forward wrote it down, where it is that one again."""
        call = self._recordings.calls.get((plan.index, now.number))
        if call is None or call.autocast != now.autocast:
            return None
        outside = call.held(func, leaves, spec, self._live, len(self._segments[plan.index].holds))
        return None if outside is None else Written(plan, call, outside, True)

    def _may_draw(self, now: OpenCall, segments: Iterable[SegmentPlan]) -> bool:
        """Whether the running call, which an earlier forward made otherwise, must be taken to draw random numbers.
        While a CUDA graph is captured nobody can look: it does what it did before."""
        if not capturing():
            return True
        before = [self._recordings.calls.get((s.index, now.number)) for s in segments]
        return any(call is None or call.draws for call in before)

    def _operands(self, now: OpenCall, func: Callable, args: tuple, kwargs: dict) -> list[tuple[torch.Tensor, int]]:
        """The call's tensors with the graph's storages, in the recorder's order."""
        call = self._plan.graph.calls[now.number]
        bound = bind(func, args, kwargs)
        tensors = operands(bound) if bound is not None else [*tensors_in(args), *tensors_in(kwargs)]
        tensors = [t for t in tensors if t.layout == torch.strided and not t.is_nested]
        values = self._plan.graph.values
        storages = [values[v].storage for v in call.operands]
        if len(tensors) < len(storages):  # what was left out may have been made by other calls
            storages = [s for s in storages if s not in self._left_out]
        if len(tensors) != len(storages):
            raise PlanMismatchError(
                f"call {call.index} ({call.op}) to read {len(storages)} tensors", f"{len(tensors)}", AGAIN
            )
        return list(zip(tensors, storages, strict=True))

    def _write(
        self, now: OpenCall, plan: SegmentPlan, func: Callable, leaves: list, spec: Any, known: Any, without: Any
    ) -> Written:
        """``known``: storages of the call's tensors by their ``id``; ``without``: ids of those that are left out."""
        call = self._plan.graph.calls[now.number]
        outside: list[tuple[torch.Tensor, int]] = []
        holds = len(self._segments[plan.index].holds)
        made: list[Any] = []
        once: dict[int, Operand] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in without:
                if id(leaf) not in once:
                    storage, hold = known.get(id(leaf), -1), -1
                    if storage in plan.inside and not self.is_live(leaf, storage):
                        self._other(leaf, storage, call.op, storage in call.writes)
                        storage = -1
                    if storage not in plan.inside:
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
        about = call.index, call.op, func, made, spec, now.autocast
        return Written(plan, RecordedCall(*about, changes=changes, without=left), outside, False)


def _running_statistics(call: Any, func: Callable, args: tuple, kwargs: dict) -> set[int]:
    """The arguments that a batch norm in training would update; without them it gives the same result."""
    bound: Any = bind(func, args, kwargs) if call.op == "batch_norm" else None
    if bound is None or not bound.training:
        return set()
    return {id(t) for t in (bound.running_mean, bound.running_var) if t is not None}
