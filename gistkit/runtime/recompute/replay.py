"""Storages that come back in backward by running a part of the forward anew (Chen et al., 2016). A segment's calls,
written down in forward (:mod:`gistkit.runtime.recompute.tape`), run once more at the first use of any of its storages,
in order and without gradients, as far as what is wanted depends on them: the same functions on the same values under
the same autocast and random state. A tensor is known by its storage and geometry, so views need no replay. What nobody
wants any more is freed on the way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from gistkit.capture import tensors_in
from gistkit.nn.keep import Kept
from gistkit.runtime.recompute.calls import (
    Operand,
    RecordedCall,
    ReplayError,
    autocast,
    geometry,
    random_state,
    set_random,
)  # fmt: skip
from gistkit.runtime.stash.stash import whole


class RecomputedBody:
    """A stash whose storage its segment's replay gives back; the values stay from then on until the last reader goes.
    Readers share them, so none may overwrite them (``fresh``).

    ``time`` is twice the number of the call at which it was saved, plus one where that call had written it already.
    ``check``, if set, looks at the values when they come back and raises where they are wrong."""

    fresh = False

    def __init__(self, segment: Segment, storage: int, time: int, x: torch.Tensor) -> None:
        self._segment, self.storage, self.time, self.dtype = segment, storage, time, x.dtype
        self._like = geometry(x)
        self.values: torch.Tensor | None = None
        self.check: Callable[[torch.Tensor], None] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.values is None else self.values.untyped_storage().nbytes()

    def dense(self) -> torch.Tensor:
        if self.values is None:
            self._segment.replay(self)
        if self.values is None:
            raise ReplayError(f"storage {self.storage} did not come back when its segment ran anew")
        return self.values

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.threshold_backward(grad, self.dense().as_strided(*self._like), 0)


class Segment:
    """One segment of one forward: its calls, its holds, and who wants what of it. ``complete``: the forward has
    returned, so that nothing more is written down."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.holds: list[Kept] = []
        self.complete = False
        self._bodies: list[weakref.ref[RecomputedBody]] = []
        self._lock = threading.RLock()

    def body(self, storage: int, time: int, x: torch.Tensor) -> RecomputedBody:
        body = RecomputedBody(self, storage, time, x)
        self._bodies.append(weakref.ref(body))
        return body

    def replay(self, asking: RecomputedBody) -> None:
        """Give every stand-in that somebody still holds its values, then let go of calls and holds; before the forward
        is complete only the one that asks."""
        with self._lock:
            bodies = [ref() for ref in self._bodies] if self.complete else [asking]
            wanted = [b for b in bodies if b is not None and b.values is None]
            calls = _needed(self.calls, wanted)
            states = [s for c in calls for s in c.random]
            now = [(device, index, random_state(device, index)) for device, index in {s[:2] for s in states}]
            try:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    _Replay(calls, self.holds, wanted).run()
            finally:
                set_random(now)
            if self.complete:
                self.calls, self.holds, self._bodies = [], [], []


def _needed(calls: list[RecordedCall], wanted: Sequence[RecomputedBody]) -> list[RecordedCall]:
    open_storages: set[int] = set()
    waiting = sorted(wanted, key=lambda b: b.time)
    found = []
    for call in reversed(calls):
        while waiting and waiting[-1].time > 2 * call.number:
            open_storages.add(waiting.pop().storage)
        made = call.made()
        if open_storages.isdisjoint(made) and open_storages.isdisjoint(call.changes):
            continue
        found.append(call)
        open_storages -= made
        open_storages.update(o.storage for o in call.operands() if o.hold < 0)
    return found[::-1]


class _Replay:
    """One run: ``_there`` maps storages that the segment makes, and holds, to tensors over them."""

    def __init__(self, calls: list[RecordedCall], holds: list[Kept], wanted: Sequence[RecomputedBody]) -> None:
        self._calls, self._holds = calls, holds
        self._waiting = sorted(wanted, key=lambda b: -b.time)
        self._there: dict[tuple[str, int], torch.Tensor] = {}
        self._given: set[int] = set()
        self._last = {_key(operand): call.number for call in calls for operand in call.operands()}

    def run(self) -> None:
        for at, call in enumerate(self._calls):
            self._step(call)
            following = self._calls[at + 1].number if at + 1 < len(self._calls) else None
            while self._waiting and (following is None or self._waiting[-1].time <= 2 * following):
                self._hand_over(self._waiting.pop())
            # what no later call reads and nobody waits for goes
            waited = {("made", b.storage) for b in self._waiting}
            for key in [k for k in self._there if self._last.get(k, -1) <= call.number and k not in waited]:
                del self._there[key]

    def _hand_over(self, body: RecomputedBody) -> None:
        base = self._there.get(("made", body.storage))
        if base is None:
            raise ReplayError(f"storage {body.storage} did not come back when its segment ran anew")
        if base.dtype != body.dtype:
            base = _over(base, ((base.untyped_storage().nbytes() // body.dtype.itemsize,), (1,), 0), body.dtype)
        self._given.add(body.storage)
        values = whole(base)
        if body.check is not None:
            body.check(values)
        body.values = values

    def _step(self, call: RecordedCall) -> None:
        for storage in self._given.intersection(call.changes):
            # somebody has the values from before this write
            old = self._there["made", storage]
            self._there["made", storage] = whole(old).clone()
            self._given.discard(storage)
        given = {id(leaf): self._argument(leaf) for leaf in call.leaves}
        leaves = [given[id(leaf)] for leaf in call.leaves]
        if call.random:
            set_random(call.random)
        with autocast(call.autocast):
            result, packed = _with_packs(call, leaves) if call.packs else (_call(call, leaves), {})
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] if call.casts else []
        del leaves, given
        made = list(tensors_in(result))
        for leaf, storage, where in call.makes:
            if leaf >= len(made) or geometry(made[leaf]) != where:
                raise ReplayError(f"{call.name} (call {call.number}) gave a tensor of another shape when it ran anew")
            self._there["made", storage] = made[leaf].detach()
        for number, storage in call.packs.items():
            if number not in packed:
                raise ReplayError(f"{call.name} (call {call.number}) saved fewer tensors when it ran anew")
            self._there["made", storage] = packed[number]
        for storage, (number, dtype) in call.casts.items():
            self._there["made", storage] = tensors[number].to(dtype)

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Operand):
            return leaf.clone_state() if type(leaf) is torch.Generator else leaf
        key = _key(leaf)
        if key not in self._there:
            if leaf.hold < 0:
                raise ReplayError(f"storage {leaf.storage} was not there when its segment ran anew")
            self._there[key] = self._holds[leaf.hold].dense()
        return _over(self._there[key], leaf.where, leaf.dtype) if leaf.hold < 0 else self._there[key]


def _key(operand: Operand) -> tuple[str, int]:
    return ("made", operand.storage) if operand.hold < 0 else ("hold", operand.hold)


def _over(base: torch.Tensor, where: Any, dtype: torch.dtype) -> torch.Tensor:
    if base.dtype == dtype:
        return base if geometry(base) == where else base.as_strided(*where)
    size, stride, offset = where
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)


def _call(call: RecordedCall, leaves: list[Any]) -> Any:
    args, kwargs = tree_unflatten(leaves, call.spec)
    return call.func(*args, **kwargs)


def _never(_: None) -> torch.Tensor:
    raise ReplayError("the graph of a call that ran anew has no backward")


def _with_packs(call: RecordedCall, leaves: list[Any]) -> tuple[Any, dict[int, torch.Tensor]]:
    """The call with gradients on, so that PyTorch shows what it would save: what a call makes inside. The graph made on
    the way holds none of it."""
    packed: dict[int, torch.Tensor] = {}
    count = 0

    def pack(t: torch.Tensor) -> None:
        nonlocal count
        if count in call.packs:
            packed[count] = t.detach()
        count += 1

    pairs = list(zip(leaves, call.leaves, strict=True))
    own = {id(k): t.detach().requires_grad_(k.requires_grad) for t, k in pairs if isinstance(k, Operand)}
    live = [own.get(id(known), leaf) for leaf, known in pairs]
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _never):
        return _call(call, live), packed
