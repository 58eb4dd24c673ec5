"""Calls of a forward as they are written down to run once more: every tensor among the arguments is an operand, a
storage that the segment makes itself, or a hold on one that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from gistkit.errors import GistError
from gistkit.runtime.signature import AUTOCAST_DEVICES, AutocastState

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
    return x.size(), x.stride(), int(x.storage_offset())


@dataclass(frozen=True)
class Operand:
    """A tensor among a call's arguments: ``storage`` of the graph that the segment makes itself, or else the number of
    a ``hold``. One tensor given twice is one operand: attention goes by whether key is value."""

    storage: int
    hold: int
    where: Geometry
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class RecordedCall:
    """One call written down. ``leaves`` and ``spec`` are its arguments, flattened, tensors as :class:`Operand`.
    ``makes``: (which tensor of its result, storage, geometry); ``changes``: storages that it overwrites; ``packs``:
    storages that it makes inside, by the number of the saved tensor; ``casts``: storages that autocast makes of its
    tensors, with the tensor's number and their dtype. ``random``: states before it where it drew random numbers."""

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
    random: tuple[RandomState, ...] = ()

    def operands(self) -> Iterator[Operand]:
        return (leaf for leaf in self.leaves if isinstance(leaf, Operand))

    def cast_of(self, x: torch.Tensor, last: bool) -> int:
        """The number of the tensor that autocast has made x of, or of whose transpose; -1 for none. Of two of one shape
        the first, or the ``last``: gistkit's operators show hooks their weight alone."""
        shapes = (x.shape, x.t().shape if x.dim() == 2 else x.shape)
        found = [i for i, o in enumerate(self.operands()) if o.dtype != x.dtype and o.where[0] in shapes]
        return found[-1 if last else 0] if found else -1

    def made(self) -> set[int]:
        return {s for _, s, _ in self.makes} | set(self.packs.values()) | set(self.casts)


@contextmanager
def autocast(states: AutocastState) -> Iterator[None]:
    """Autocast as it was in forward, without its cache of casts."""
    with ExitStack() as stack:
        for device, (enabled, dtype) in zip(AUTOCAST_DEVICES, states, strict=True):
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def random_state(device: str, index: int) -> bytes:
    """The state of a device's default generator."""
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(index)
    return state.numpy().tobytes()


def set_random(states: Iterable[RandomState]) -> None:
    """Set the default generators to these states."""
    for device, index, state in states:
        packed = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        torch.set_rng_state(packed) if device == "cpu" else torch.cuda.set_rng_state(packed, index)
