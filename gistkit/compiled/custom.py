"""The class that Inductor calls as its partitioner. A module of its own: it imports Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from gistkit.compiled import compat, door, record
from gistkit.compiled.partitioner import Settings, cut, sources

Graphs = tuple[fx.GraphModule, fx.GraphModule]


class Joined(compat.pass_base()):
    """The pass behind Inductor's fusion: rebuilds join kernels of plain ``torch.compile``, draws keep their order."""

    def uuid(self) -> Any:
        """As :meth:`Partitioner.uuid`."""
        return sources()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return compat.draw_in_turn(compat.join(nodes))


@dataclass(frozen=True)
class Partitioner(compat.partitioner_base()):
    """:func:`gistkit.compiled.partitioner.cut` under settings, for ``options={"custom_partitioner_fn": ...}``."""

    settings: Settings

    def uuid(self) -> Any:
        """What PyTorch's caches of compiled graphs tell partitioners apart by."""
        return sources(), repr(self.settings)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        return cut(gm, joint_inputs, self.settings, **kwargs)


class ForTraced(compat.partitioner_base()):
    """Cuts graphs of compressed models (:mod:`gistkit.compiled.door`) as those ask, others as PyTorch does."""

    def uuid(self) -> Any:
        """As :meth:`Partitioner.uuid`; graphs without a compressed model are told apart by that alone."""
        settings = door.settings_in_force()
        return "plain" if settings is None else Partitioner(settings).uuid()

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        settings = door.settings_in_force()
        if settings is None:
            return compat.min_cut(gm, joint_inputs, **kwargs)
        with record.collected() as found:
            made = cut(gm, joint_inputs, settings, **kwargs)
        door.remember_traced(found)
        return made
