"""Calls of a forward as they are written down to run once more: every tensor among the arguments is an operand, a
storage that the segment makes itself, or a hold on one that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch._prims_common import make_contiguous_strides_for
from torch.utils._pytree import tree_flatten, tree_unflatten

from gistkit.errors import GistError, PlanMismatchError
from gistkit.kernels import capturing
from gistkit.runtime.signature import AUTOCAST_DEVICES, AutocastState, autocast_now, autocast_states

Geometry = tuple[torch.Size, tuple[int, ...], int]
RandomState = tuple[str, int, bytes]
"""Device type, index, state of its default generator."""


class ReplayError(GistError):
    """A segment that runs anew made something else than its forward; the message says what to change."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; a forward that runs anew must make the same tensors: change nothing that it depends on before "
            'backward, or plan with policy="gist", which runs nothing anew'
        )


def geometry(x: torch.Tensor) -> Geometry:
    """Size, strides and storage offset."""
    offset: Any = x.storage_offset()
    return x.shape, x.stride(), offset


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor among a call's arguments: ``storage`` of the graph that the segment makes itself, or else the number of
    a ``hold``. One tensor given twice is one operand: attention goes by whether key is value."""

    storage: int
    hold: int
    where: Geometry
    dtype: torch.dtype
    requires_grad: bool

    @cached_property
    def key(self) -> int:
        """Its storage, or a number below 0 for its hold."""
        return self.storage if self.hold < 0 else -1 - self.hold


@dataclass(eq=False)
class RecordedCall:
    """One call written down, without tensors: a later forward that makes it again has the same record.

    ``leaves`` and ``spec`` are its arguments, flattened, tensors as :class:`Operand`; ``without``: leaves that are left
    out for None. ``makes``: (which tensor of its result, storage, geometry); ``changes``: storages that it overwrites;
    ``packs``: storages that it makes inside, by the number of the saved tensor; ``casts``: storages that autocast makes
    of its tensors, with the tensor's number and their dtype. ``draws``: whether it drew random numbers. ``again``: what
    runs it once more, of (func, args, kwargs), where that is not the function alone.
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
    casts: dict[int, tuple[int, torch.dtype]] = field(default_factory=dict)
    without: frozenset[int] = frozenset()
    draws: bool = False
    again: Callable | None = None

    def operands(self) -> Iterator[Operand]:
        return (leaf for leaf in self.leaves if isinstance(leaf, Operand))

    @cached_property
    def _checks(self) -> tuple[tuple, tuple, tuple]:
        """What is asked of a later call's leaves: of each operand's, of further ones that are that very tensor, and of
        constants."""
        first: dict[Operand, int] = {}
        twice, constants = [], []
        for place, known in enumerate(self.leaves):
            if type(known) is not Operand:
                constants.append((place, known, place in self.without))
            elif first.setdefault(known, place) != place:
                twice.append((place, first[known]))
        operands = tuple((at, o.dtype, o.requires_grad, *o.where, o.storage, o.hold) for o, at in first.items())
        return operands, tuple(twice), tuple(constants)

    def held(
        self, func: Callable, leaves: list[Any], spec: Any, live: Mapping[int, int], holds: int
    ) -> list[tuple[torch.Tensor, int]] | None:
        """What a call that is this one once more holds for its segment, beside ``holds`` tensors, with the storages;
        None where it is another. ``live``: what calls have made, by address."""
        if func is not self.func or spec != self.spec:
            return None
        operands, twice, constants = self._checks
        outside: list[tuple[torch.Tensor, int]] = []
        for at, dtype, grad, shape, stride, offset, storage, hold in operands:
            x = leaves[at]
            if type(x) not in _TENSORS and not isinstance(x, torch.Tensor):
                return None
            if x.dtype is not dtype or x.requires_grad is not grad or x.shape != shape or x.stride() != stride:
                return None
            if x.storage_offset() != offset:
                return None
            if hold < 0:
                if live.get(x.untyped_storage()._cdata) != storage:
                    return None
            elif hold != holds + len(outside):
                return None
            else:
                outside.append((x, storage))
        for at, before in twice:
            if leaves[at] is not leaves[before]:
                return None
        for at, known, is_left_out in constants:
            leaf = leaves[at]
            if leaf is not known and not (is_left_out or _is_constant(leaf, known)):
                return None
        if len(operands) > 1 and len({id(leaves[o[0]]) for o in operands}) < len(operands):
            return None
        return outside

    def cast_of(self, x: torch.Tensor, last: bool) -> int:
        """The number of the tensor that autocast has made x of, or of whose transpose; -1 for none. Of two of one shape
        the first, or the ``last``: gistkit's operators show hooks their weight alone. PyTorch's products
        flatten rows, of a tensor that is not contiguous in a copy of other order than the cast's."""
        shapes = (x.shape, x.t().shape if x.dim() == 2 else x.shape)

        def is_cast(where: Geometry) -> bool:
            shape, stride, _ = where
            flattened = shape[-1:] == x.shape[-1:] and shape.numel() == x.numel()
            return shape in shapes or (flattened and stride == make_contiguous_strides_for(shape))

        found = [i for i, o in enumerate(self.operands()) if o.dtype != x.dtype and is_cast(o.where)]
        return found[-1 if last else 0] if found else -1

    def made(self) -> set[int]:
        return {s for _, s, _ in self.makes} | set(self.packs.values()) | set(self.casts)


def _is_constant(leaf: Any, known: Any) -> bool:
    """Whether two arguments without tensors are the same; not NaN, nor zeros, whose signs may differ."""
    same = type(leaf) is type(known) and type(leaf) is not torch.Tensor and leaf == known
    return same and (type(leaf) is not float or leaf != 0)


class Nested(NamedTuple):
    """A call's number of arguments, names and, by place among these, type and length of lists and tuples of leaves."""

    count: int
    names: tuple[str, ...]
    lists: tuple[tuple[int, type, int], ...]


def flattened(args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    """Arguments as leaves, and what :func:`unflattened` needs beside them. A tuple of numbers, as a shape is one, is a
    leaf."""
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if type(leaf) not in _LEAVES and isinstance(leaf, (list, tuple, dict)) and not _is_shape(leaf):
            return _nested(leaves, args, kwargs)
    return leaves, (len(args), *kwargs)


def _nested(given: list[Any], args: tuple, kwargs: dict) -> tuple[list[Any], Any]:
    leaves, lists = [], []
    for place, leaf in enumerate(given):
        kind = type(leaf)
        if kind in _LEAVES or not isinstance(leaf, (list, tuple, dict)) or _is_shape(leaf):
            leaves.append(leaf)
        elif kind in (list, tuple) and _LEAVES.issuperset(map(type, leaf)):
            lists.append((place, kind, len(leaf)))
            leaves += leaf
        else:
            return tree_flatten((args, kwargs))
    return leaves, Nested(len(args), tuple(kwargs), tuple(lists))


_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LEAVES = frozenset((*_TENSORS, int, float, bool, str, type(None)))


def _is_shape(leaf: Any) -> bool:
    return type(leaf) in (tuple, torch.Size) and all([type(n) is int for n in leaf])


def unflattened(leaves: list[Any], spec: Any) -> tuple[Any, Any]:
    """The arguments that were flattened."""
    if type(spec) is Nested:
        leaves = list(leaves)
        for place, kind, length in spec.lists:
            leaves[place : place + length] = [kind(leaves[place : place + length])]
        spec = (spec.count, *spec.names)
    if type(spec) is not tuple:
        return tree_unflatten(leaves, spec)
    count, *names = spec
    return leaves[:count], dict(zip(names, leaves[count:], strict=True))


class autocast:
    """Autocast as it was in forward, without its cache of casts."""

    __slots__ = ("_before", "_cache", "_states")

    def __init__(self, states: AutocastState) -> None:
        self._before = None if states == autocast_now() else autocast_states()
        self._states, self._cache = states, torch.is_autocast_cache_enabled()

    def __enter__(self) -> None:
        if self._before is not None:
            _set_autocast(self._states)
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: Any) -> None:
        if self._before is not None:
            _set_autocast(self._before)
        torch.set_autocast_cache_enabled(self._cache)


def _set_autocast(states: AutocastState) -> None:
    for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, states, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def random_state(device: str, index: int) -> bytes:
    """The state of a device's default generator. Raises PlanMismatchError while a CUDA graph is captured."""
    if device != "cpu" and capturing():
        expected = "a step outside CUDA graphs, as the plan runs calls that draw random numbers anew"
        remedy = "plan with policy='gist', which runs nothing anew, or without dropout"
        raise PlanMismatchError(expected, "the capture of one", remedy)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(index)
    return state.numpy().tobytes()


def random_states(found: Iterable[torch.Tensor]) -> tuple[RandomState, ...]:
    """The states of the CPU's default generator and of those of the devices that the tensors are on."""
    devices = {("cpu", 0)} | {("cuda", t.device.index) for t in found if t.is_cuda}
    return tuple((device, index, random_state(device, index)) for device, index in sorted(devices))


def set_random(states: Iterable[RandomState]) -> None:
    """Set the default generators to these states."""
    for device, index, state in states:
        packed = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        torch.set_rng_state(packed) if device == "cpu" else torch.cuda.set_rng_state(packed, index)
