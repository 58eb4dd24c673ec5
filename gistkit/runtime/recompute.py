"""Storages that come back in backward by running a part of the forward anew (Chen et al., 2016).

A segment's calls are written down in forward (:mod:`gistkit.runtime.recompute_tape`) with every tensor replaced by an
operand: a storage that the segment makes itself, or a hold on one that is kept. At the first use of any of its
storages the calls run once more, in order and without gradients, as far as what is still wanted depends on them: the
same functions on the same values under the same autocast and random state, so with the same bits. A tensor is told by
its storage and geometry, so views need no replay. What nobody wants any more is freed as the replay goes along.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from gistkit.errors import GistError
from gistkit.graph.ledger import tensors_in
from gistkit.kernels.layout import flat
from gistkit.nn.keep import Kept
from gistkit.runtime.recompute_state import AutocastState, RandomState, autocast, random_states_back, set_random
from gistkit.runtime.stash import whole

Geometry = tuple[torch.Size, tuple[int, ...], int]


class ReplayError(GistError):
    """A call that runs anew did not give what it gave in forward."""


def geometry(x: torch.Tensor) -> Geometry:
    """Size, stride and offset of x in its storage."""
    return x.size(), x.stride(), int(x.storage_offset())


@dataclass(frozen=True)
class Operand:
    """A tensor among a call's arguments: ``storage`` of the graph that the segment makes itself, or a hold, by its
    number, on one that it does not."""

    storage: int
    hold: int
    where: Geometry
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Written:
    """One call written down. ``leaves`` and ``spec`` are its arguments, flattened, tensors as :class:`Operand`.

    ``makes``: (which tensor of its result, storage, geometry); ``changes``: storages that it overwrites; ``packs``:
    storages that it makes inside, by the number of the saved tensor; ``casts``: storages that autocast makes of its
    first operand. ``random``: (device type, index, state before it) where it drew random numbers.
    """

    number: int
    name: str
    func: Callable
    leaves: list[Any]
    spec: Any
    autocast: AutocastState
    makes: tuple[tuple[int, int, Geometry], ...] = ()
    changes: tuple[int, ...] = ()
    packs: dict[int, int] = field(default_factory=dict)
    casts: dict[int, torch.dtype] = field(default_factory=dict)
    random: tuple[RandomState, ...] = ()

    def operands(self) -> Iterator[Operand]:
        """Its tensors."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Operand))

    def made(self) -> set[int]:
        """Storages that are new with this call."""
        return {s for _, s, _ in self.makes} | set(self.packs.values()) | set(self.casts)


class AgainBody:
    """A stash whose storage its segment's replay gives back; the values stay from then on until the last reader goes.

    ``time`` is twice the number of the call at which it was saved, plus one where that call had written it already.
    """

    def __init__(self, segment: Segment, storage: int, time: int, x: torch.Tensor) -> None:
        self._segment, self.storage, self.time, self.dtype = segment, storage, time, x.dtype
        self._like = geometry(x)
        self._values: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now: none before the replay."""
        return 0 if self._values is None else self._values.untyped_storage().nbytes()

    @property
    def fresh(self) -> bool:
        """Whether :meth:`dense` gives memory that its caller may overwrite: other readers share it."""
        return False

    @property
    def values(self) -> torch.Tensor | None:
        """What it holds now."""
        return self._values

    def settle(self, values: torch.Tensor | None) -> None:
        """Hold these values, or none."""
        self._values = values

    def dense(self) -> torch.Tensor:
        """The whole storage; replays the segment where that has not happened."""
        if self._values is not None:
            return self._values
        if not self._segment.complete:
            return self._segment.now(self)
        self._segment.replay()
        if self._values is None:
            raise ReplayError(f"storage {self.storage} did not come back when its segment ran anew")
        return self._values

    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop in storage order."""
        return flat(self.dense())[start:stop]

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """ReLU's input gradient, the ReLU's output being the tensor that was saved."""
        return torch.ops.aten.threshold_backward(grad, self.dense().as_strided(*self._like), 0)


class Segment:
    """One segment of one forward: its calls, its holds, and who wants what of it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls: list[Written] = []
        self.holds: list[Kept] = []
        self.complete = False
        """Whether the forward has returned, so that nothing more is written down."""
        self._bodies: list[weakref.ref[AgainBody]] = []
        self._lock = threading.RLock()

    def body(self, storage: int, time: int, x: torch.Tensor) -> AgainBody:
        """A stand-in for x, saved at a time of the forward."""
        body = AgainBody(self, storage, time, x)
        self._bodies.append(weakref.ref(body))
        return body

    def living(self) -> list[AgainBody]:
        """The stand-ins that somebody still holds."""
        return [b for b in (ref() for ref in self._bodies) if b is not None]

    def now(self, body: AgainBody) -> torch.Tensor:
        """The values of one stand-in while the forward still runs; it does not keep them."""
        given: list[torch.Tensor] = []
        with self._lock:
            run_anew(self.calls, self.holds, [body], lambda _, values: given.append(values))
        return given[0]

    def replay(self) -> None:
        """Give every living stand-in its values, then let go of calls and holds."""
        with self._lock:
            wanted = [b for b in self.living() if b.values is None]
            given: list[tuple[AgainBody, torch.Tensor]] = []
            run_anew(self.calls, self.holds, wanted, lambda body, values: given.append((body, values)))
            for body, values in given:
                body.settle(values)
            self.calls, self.holds, self._bodies = [], [], []


Give = Callable[[AgainBody, torch.Tensor], None]


def run_anew(calls: list[Written], holds: list[Kept], wanted: list[AgainBody], give: Give) -> None:
    """Run the calls that ``wanted`` depends on and give each of them its values as soon as they are there."""
    needed = _needed(calls, wanted)
    states = [s for c in needed for s in c.random]
    with torch.no_grad(), torch._C.DisableTorchFunction(), random_states_back(states):
        _Replay(needed, holds, wanted, give).run()


def _needed(calls: list[Written], wanted: list[AgainBody]) -> list[Written]:
    """The calls on which the wanted storages depend, in order."""
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

    def __init__(self, calls: list[Written], holds: list[Kept], wanted: list[AgainBody], give: Give) -> None:
        self._calls, self._holds, self._give = calls, holds, give
        self._waiting = sorted(wanted, key=lambda b: -b.time)
        self._there: dict[tuple[str, int], torch.Tensor] = {}
        self._given: set[int] = set()
        self._last: dict[tuple[str, int], int] = {}
        for call in calls:
            for operand in call.operands():
                self._last[_key(operand)] = call.number

    def run(self) -> None:
        for at, call in enumerate(self._calls):
            self._step(call)
            following = self._calls[at + 1].number if at + 1 < len(self._calls) else None
            while self._waiting and (following is None or self._waiting[-1].time <= 2 * following):
                self._hand_over(self._waiting.pop())
            self._forget(call)

    def _hand_over(self, body: AgainBody) -> None:
        base = self._there.get(("made", body.storage))
        if base is None:
            raise ReplayError(f"storage {body.storage} did not come back when its segment ran anew")
        if base.dtype != body.dtype:
            base = _over(base, ((base.untyped_storage().nbytes() // body.dtype.itemsize,), (1,), 0), body.dtype)
        self._given.add(body.storage)
        self._give(body, whole(base))

    def _forget(self, call: Written) -> None:
        """Let go of what no later call reads and nobody waits for."""
        waited = {("made", b.storage) for b in self._waiting}
        for key in [k for k in self._there if self._last.get(k, -1) <= call.number and k not in waited]:
            del self._there[key]

    def _step(self, call: Written) -> None:
        for storage in self._given.intersection(call.changes):
            # somebody has the values from before this write
            old = self._there["made", storage]
            self._there["made", storage] = whole(old).clone()
            self._given.discard(storage)
        leaves = [self._tensor(leaf) if isinstance(leaf, Operand) else leaf for leaf in call.leaves]
        if call.random:
            set_random(call.random)
        with autocast(call.autocast):
            result, packed = _with_packs(call, leaves) if call.packs else (_call(call, leaves), {})
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        del leaves
        self._keep_results(call, result)
        for number, storage in call.packs.items():
            if number not in packed:
                raise ReplayError(f"{call.name} (call {call.number}) saved fewer tensors when it ran anew")
            self._there["made", storage] = packed[number]
        for storage, dtype in call.casts.items():
            assert first is not None
            self._there["made", storage] = first.to(dtype)

    def _keep_results(self, call: Written, result: Any) -> None:
        made = list(tensors_in(result))
        for leaf, storage, where in call.makes:
            if leaf >= len(made) or geometry(made[leaf]) != where:
                raise ReplayError(f"{call.name} (call {call.number}) gave a tensor of another shape when it ran anew")
            self._there["made", storage] = made[leaf].detach()

    def _tensor(self, operand: Operand) -> torch.Tensor:
        key = _key(operand)
        if key not in self._there:
            if operand.hold < 0:
                raise ReplayError(f"storage {operand.storage} was not there when its segment ran anew")
            self._there[key] = self._holds[operand.hold].dense()
        return _over(self._there[key], operand.where, operand.dtype) if operand.hold < 0 else self._there[key]


def _key(operand: Operand) -> tuple[str, int]:
    return ("made", operand.storage) if operand.hold < 0 else ("hold", operand.hold)


def _over(base: torch.Tensor, where: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that geometry and dtype over base's storage."""
    if base.dtype == dtype:
        return base if geometry(base) == where else base.as_strided(*where)
    size, stride, offset = where
    return torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)


def _call(call: Written, leaves: list[Any]) -> Any:
    args, kwargs = tree_unflatten(leaves, call.spec)
    return call.func(*args, **kwargs)


def _never(_: None) -> torch.Tensor:
    raise ReplayError("the graph of a call that ran anew has no backward")


def _with_packs(call: Written, leaves: list[Any]) -> tuple[Any, dict[int, torch.Tensor]]:
    """The call with gradients on, so that PyTorch shows what it would save: that is how one gets at what a call makes
    inside. The graph made on the way holds none of it."""
    packed: dict[int, torch.Tensor] = {}
    count = 0

    def pack(t: torch.Tensor) -> None:
        nonlocal count
        if count in call.packs:
            packed[count] = t.detach()
        count += 1

    live = [
        leaf.detach().requires_grad_(known.requires_grad) if isinstance(known, Operand) else leaf
        for leaf, known in zip(leaves, call.leaves, strict=True)
    ]
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _never):
        return _call(call, live), packed


__all__ = ["AgainBody", "Geometry", "Operand", "ReplayError", "Segment", "Written", "geometry", "run_anew"]
