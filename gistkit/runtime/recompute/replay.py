"""Storages that come back in backward by running a part of the forward anew (Chen et al., 2016). A segment's calls,
written down in forward (:mod:`gistkit.runtime.recompute.tape`), run once more at the first use of any of its storages,
in order and without gradients, as far as what is wanted depends on them: the same functions on the same values under
the same autocast and random state. A tensor is known by its storage and geometry, so views need no replay. What nobody
wants any more is freed on the way."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from gistkit.capture import tensors_in
from gistkit.nn.keep import Kept
from gistkit.runtime.recompute.calls import (
    Operand,
    RandomState,
    RecordedCall,
    ReplayError,
    autocast,
    geometry,
    random_state,
    set_random,
    unflattened,
)
from gistkit.runtime.recompute.steps import Reruns, Step, steps
from gistkit.runtime.stash.stash import whole

_AUTOCAST = attrgetter("call.autocast")
RERUNS = 16
"""Of one segment's so many are known, by what was wanted and written down, before all are forgotten."""


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
        segment.bodies.append(weakref.ref(self))

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
    """One segment of one forward: its calls, its holds, random states before the calls that draw, and who wants what of
    it. ``complete``: the forward has returned, so that nothing more is written down."""

    def __init__(self, reruns: Reruns) -> None:
        self.calls: list[RecordedCall] = []
        self.holds: list[Kept] = []
        self.random: dict[int, tuple[RandomState, ...]] = {}
        self.complete, self._reruns = False, reruns
        self.bodies: list[weakref.ref[RecomputedBody]] = []
        self._lock = threading.RLock()

    def replay(self, asking: RecomputedBody) -> None:
        """Give every stand-in that somebody still holds its values, then let go of calls and holds; before the forward
        is complete only the one that asks."""
        with self._lock:
            bodies = [ref() for ref in self.bodies] if self.complete else [asking]
            wanted = [b for b in bodies if b is not None and b.values is None]
            states = [s for found in self.random.values() for s in found]
            now = [(device, index, random_state(device, index)) for device, index in {s[:2] for s in states}]
            try:
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    _Replay(self.holds, self.random).run(self._steps(wanted), wanted)
            finally:
                set_random(now)
            if self.complete:
                self.calls, self.holds, self.bodies = [], [], []

    def _steps(self, wanted: list[RecomputedBody]) -> tuple[Step, ...]:
        key = tuple([(b.storage, b.time) for b in wanted]), tuple(self.calls)
        if key not in self._reruns:
            if len(self._reruns) >= RERUNS:
                self._reruns.clear()
            self._reruns[key] = steps(self.calls, key[0])
        return self._reruns[key]


BY_GRADIENTS = frozenset(("scaled_dot_product_attention",))
"""Calls of which PyTorch chooses the kernel by what needs a gradient, as an attention's mask."""


class _Replay:
    """One run: ``_there`` maps storages that the segment makes, and holds, to tensors over them."""

    def __init__(self, holds: list[Kept], random: Mapping[int, tuple[RandomState, ...]]) -> None:
        self._holds, self._random = holds, random
        self._there: dict[int, torch.Tensor] = {}
        self._given: set[int] = set()

    def run(self, todo: Iterable[Step], wanted: Sequence[RecomputedBody]) -> None:
        there = self._there
        for state, several in groupby(todo, _AUTOCAST):
            with autocast(state):
                for step in several:
                    self._step(step)
                    for number in step.gives:
                        self._hand_over(wanted[number])
                    for key in step.gone:
                        if key in there:
                            del there[key]

    def _hand_over(self, body: RecomputedBody) -> None:
        base = self._there.get(body.storage)
        if base is None:
            raise ReplayError(f"storage {body.storage} did not come back when its segment ran anew")
        if base.dtype != body.dtype:
            base = _over(base, ((base.untyped_storage().nbytes() // body.dtype.itemsize,), (1,), 0), body.dtype)
        self._given.add(body.storage)
        values = whole(base)
        if body.check is not None:
            body.check(values)
        body.values = values

    def _step(self, step: Step) -> None:
        call, there = step.call, self._there
        for storage in self._given.intersection(call.changes) if call.changes else ():
            # somebody has the values from before this write
            there[storage] = whole(there[storage]).clone()
            self._given.discard(storage)
        leaves = [leaf.clone_state() if type(leaf) is torch.Generator else leaf for leaf in call.leaves]
        for operand, key, positions, as_is in step.operands:
            x = there[key] if key in there else self._held(operand)
            if key >= 0 and not as_is:
                x = _over(x, operand.where, operand.dtype)
            for position in positions:
                leaves[position] = x
        x = None
        if call.number in self._random:
            set_random(self._random[call.number])
        if step.runs:
            self._run(step, leaves)
        if call.casts:
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            for storage, (number, dtype) in call.casts.items():
                there[storage] = tensors[number].to(dtype)

    def _run(self, step: Step, leaves: list[Any]) -> None:
        call, there = step.call, self._there
        as_then = call.packs or call.name in BY_GRADIENTS
        result, packed = _with_packs(step, leaves) if as_then else (_call(call, leaves), {})
        made = (result,) if type(result) is torch.Tensor else tuple(tensors_in(result))
        for leaf, storage, where in call.makes:
            if leaf >= len(made) or geometry(made[leaf]) != where:
                raise ReplayError(f"{call.name} (call {call.number}) gave a tensor of another shape when it ran anew")
            there[storage] = made[leaf].detach() if made[leaf].requires_grad else made[leaf]
        for number, storage in call.packs.items():
            if number not in packed:
                raise ReplayError(f"{call.name} (call {call.number}) saved fewer tensors when it ran anew")
            there[storage] = packed[number]

    def _held(self, operand: Operand) -> torch.Tensor:
        if operand.key >= 0:
            raise ReplayError(f"storage {operand.storage} was not there when its segment ran anew")
        x = self._there[operand.key] = self._holds[operand.hold].dense()
        return x


def _over(base: torch.Tensor, where: Any, dtype: torch.dtype) -> torch.Tensor:
    if base.dtype == dtype:
        return base if geometry(base) == where else base.as_strided(*where)
    size, stride, offset = where
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)


def _call(call: RecordedCall, leaves: list[Any]) -> Any:
    args, kwargs = unflattened(leaves, call.spec)
    return call.func(*args, **kwargs) if call.again is None else call.again(call.func, args, kwargs)


def _never(_: None) -> torch.Tensor:
    raise ReplayError("the graph of a call that ran anew has no backward")


def _with_packs(step: Step, leaves: list[Any]) -> tuple[Any, dict[int, torch.Tensor]]:
    """The call with gradients on, so that PyTorch takes forward's kernel and shows what it would save: what a call
    makes inside. The graph made on the way holds none of it."""
    packed: dict[int, torch.Tensor] = {}
    count, packs = 0, step.call.packs

    def pack(t: torch.Tensor) -> None:
        nonlocal count
        if count in packs:
            packed[count] = t.detach()
        count += 1

    live = leaves.copy()
    for operand, _, positions, _ in step.operands:
        own = leaves[positions[0]].detach()
        own.requires_grad = operand.requires_grad
        for position in positions:
            live[position] = own
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _never):
        return _call(step.call, live), packed
