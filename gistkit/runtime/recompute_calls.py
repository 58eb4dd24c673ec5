"""Calls of a forward as they are written down to run once more: every tensor among the arguments is an operand, a
storage that the segment makes itself, or a hold on one that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gistkit.errors import GistError
from gistkit.runtime.recompute_state import AutocastState, RandomState

Geometry = tuple[torch.Size, tuple[int, ...], int]


class ReplayError(GistError):
    """A call that runs anew did not give what it gave in forward; ``what`` says which and how."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; a forward that runs anew must make the same tensors: change nothing that it depends on before "
            'backward, or plan with policy="gist", which runs nothing anew'
        )


def geometry(x: torch.Tensor) -> Geometry:
    """Size, stride and offset of x in its storage."""
    return x.size(), x.stride(), int(x.storage_offset())


@dataclass(frozen=True)
class Operand:
    """A tensor among a call's arguments: ``storage`` of the graph that the segment makes itself, or a hold, by its
    number, on one that it does not. One tensor given twice is one operand: attention goes by whether key is value."""

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
    first operand. ``random``: (device type, index, state before it) where it drew random numbers. ``switch``: the name
    of cuDNN's switches that a convolution ran under.
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
    switch: str = ""

    def operands(self) -> Iterator[Operand]:
        """Its tensors."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Operand))

    def made(self) -> set[int]:
        """Storages that are new with this call."""
        return {s for _, s, _ in self.makes} | set(self.packs.values()) | set(self.casts)


__all__ = ["Geometry", "Operand", "ReplayError", "Written", "geometry"]
