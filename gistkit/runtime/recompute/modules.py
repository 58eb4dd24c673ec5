"""Modules that run anew whole in backward, for plans that name them (:attr:`Plan.modules`): what non-reentrant
``torch.utils.checkpoint`` does, with less host work for each saved tensor. In forward a number stands for each tensor
that a module's call saves. The first that backward asks for runs the module once more, with gradients on, under the
same autocast and random states, and what it saves now is given to those that still wait. Once for each shape and
setting it is held against digests of what forward saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gistkit.capture import tensors_in
from gistkit.kernels import capturing
from gistkit.nn.standin import settings
from gistkit.runtime.recompute.calls import RandomState, ReplayError, random_state, random_states, set_random
from gistkit.runtime.signature import AUTOCAST_DEVICES, autocast_now
from gistkit.runtime.stash.stash import whole
from gistkit.runtime.stash.verify import digest

RANDOM_STATE_BYTES = 16
"""At most what an attention saves as its random state, which nobody writes where it has no dropout."""


@dataclass
class Known:
    """What is known of a module from step to step: its parameters, whether it was seen to draw random numbers, and of
    which kinds of calls the same bits came back."""

    parameters: tuple[torch.nn.Parameter, ...]
    draws: bool = False
    exact: set[tuple] = field(default_factory=set)


@contextmanager
def run_anew(model: torch.nn.Module, names: Iterable[str], known: dict[str, Known]) -> Iterator[None]:
    """Within this block calls of these modules save numbers. A forward that somebody has put on the instance runs
    within. ``known``: by name, kept from step to step."""
    found = []
    try:
        for name in names:
            module = model.get_submodule(name)
            if name not in known:
                known[name] = Known(tuple(module.parameters()))
            own = vars(module).get("forward")
            found.append((module, own))
            module.forward = _Anew(module.forward, name, known[name])
        yield
    finally:
        for module, own in found:
            if own is None:
                del module.forward
            else:
                module.forward = own


class _Anew:
    """Stands in the module's ``forward``."""

    def __init__(self, forward: Callable, name: str, known: Known) -> None:
        self._forward, self._name, self._known = forward, name, known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        call = _Call(self._forward, self._name, args, kwargs, (*given, *self._known.parameters))
        kind = (*((t.shape, t.stride(), t.dtype, t.device) for t in given), call.autocast, settings())
        if kind not in self._known.exact and not capturing():
            call.check = _Check(call.reads, lambda: self._known.exact.add(kind))
        before = () if capturing() else random_states(given)
        with saved_tensors_hooks(call.pack, call.unpack):
            out = self._forward(*args, **kwargs)
        if any(random_state(device, index) != state for device, index, state in before):
            self._known.draws, call.random = True, before
        elif capturing() and self._known.draws:
            random_states(given)  # which refuses it
        call.complete = True
        return out


class _Number:
    """Stands for the tensor that a call saved at that place."""

    __slots__ = ("__weakref__", "place")

    def __init__(self, place: int) -> None:
        self.place = place


class _Done(BaseException):
    """Ends a rerun that has made all that is wanted; no handler of the model's may take it."""


class _Check:
    """Whether a call's rerun saves the forward's own bits, by a digest of each storage that the call makes and saves.
    ``exact`` is called where all of it did."""

    def __init__(self, reads: Iterable[torch.Tensor], exact: Callable[[], object]) -> None:
        self.exact = exact
        self._seen = {(t.untyped_storage()._cdata, t._version) for t in reads}
        self._digests: dict[int, int] = {}
        # so long no other storage gets the address of one that has gone
        self._held: list[StorageWeakRef] = []

    def saved(self, place: int, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata, x._version
        if key in self._seen or not (x.is_floating_point() or storage.nbytes() > RANDOM_STATE_BYTES):
            return
        self._seen.add(key)
        self._held.append(StorageWeakRef(storage))
        self._digests[place] = digest(whole(x))

    def differs(self, place: int, x: torch.Tensor) -> bool:
        return place in self._digests and digest(whole(x)) != self._digests[place]


class _Call:
    """One call of a module: the tensors that it ``reads``, the ``random`` states before it where it has drawn, and by
    place the number and the kind of each tensor that it saved. ``complete``: it has returned."""

    def __init__(
        self, forward: Callable, name: str, args: tuple, kwargs: dict, reads: tuple[torch.Tensor, ...]
    ) -> None:
        self._forward, self._name, self._args, self._kwargs = forward, name, args, kwargs
        self.autocast, self._caches = autocast_now(), torch.is_autocast_cache_enabled()
        self._numbers: list[weakref.ref[_Number]] = []
        self._kinds: list[tuple] = []
        self._values: dict[int, torch.Tensor] = {}
        self.reads, self._versions = reads, [t._version for t in reads]
        self.random: tuple[RandomState, ...] = ()
        self.check: _Check | None = None
        self.complete = False

    def pack(self, x: torch.Tensor) -> _Number:
        number = _Number(len(self._kinds))
        if self.check is not None:
            self.check.saved(number.place, x)
        self._numbers.append(weakref.ref(number))
        self._kinds.append((x.shape, x.dtype))
        return number

    def unpack(self, number: _Number) -> torch.Tensor:
        if number.place not in self._values:
            if not self.complete:
                raise ReplayError(f"module {self._name} was to run anew within its own forward, which runs backward")
            self._run()
        return self._values.pop(number.place)

    def _run(self) -> None:
        if [t._version for t in self.reads] != self._versions:
            raise ReplayError(f"what module {self._name} was given, or a parameter, has changed since its forward")
        now = [(device, index, random_state(device, index)) for device, index, _ in self.random]
        states = zip(AUTOCAST_DEVICES, self.autocast, strict=True)
        on_cpu, on_cuda = (torch.autocast(d, dtype, enabled, self._caches) for d, (enabled, dtype) in states)
        set_random(self.random)
        try:
            with torch.enable_grad(), on_cpu, on_cuda, saved_tensors_hooks(self._again(), _never):
                self._forward(*self._args, **self._kwargs)
            raise ReplayError(f"module {self._name} saved fewer tensors when it ran anew")
        except _Done:
            if self.check is not None:
                self.check.exact()
        finally:
            set_random(now)

    def _again(self) -> Callable[[torch.Tensor], None]:
        """The hook that takes what the rerun saves, until it has all."""
        numbers, kinds, values, last = self._numbers, self._kinds, self._values, len(self._kinds) - 1
        place, check = -1, self.check

        def pack(x: torch.Tensor) -> None:
            nonlocal place
            place += 1
            if kinds[place] != (x.shape, x.dtype):
                raise ReplayError(f"module {self._name} saved another tensor when it ran anew")
            if check is not None and check.differs(place, x):
                raise ReplayError(f"module {self._name} did not save the same bits when it ran anew")
            if numbers[place]() is not None:
                values[place] = x.detach()
            if place == last:
                raise _Done

        return pack


def _never(_: None) -> torch.Tensor:
    raise ReplayError("the graph of a module that ran anew has no backward")
