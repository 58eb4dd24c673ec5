"""The class that Inductor calls as its partitioner. A module of its own: it imports Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from gistkit.compiled import compat, door, fusion, record
from gistkit.compiled.partitioner import Settings, cut, sources


@dataclass(frozen=True)
class KernelPass(compat.pass_base()):
    """A pass over Inductor's kernels."""

    run: Callable[[list[Any]], list[Any]]

    def uuid(self) -> Any:
        """As :meth:`Partitioner.uuid`."""
        return sources()

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return self.run(nodes)


_JOIN = "_post_fusion_custom_pass"
PASSES = {"_pre_fusion_custom_pass": KernelPass(fusion.set_apart), _JOIN: KernelPass(fusion.join)}
"""Rebuilds join kernels of plain ``torch.compile`` behind Inductor's own fusion; draws keep their order."""


def options(settings: Settings, **given: Any) -> dict[str, Any]:
    """Inductor's options: those given, and gistkit's own. Under a budget Inductor keeps no freed buffer for a later one
    of its size, as it does up to its own estimate of the peak: 6 % above the predicted one in a ResNet-50 at 40 %."""
    own = {} if settings.budget is None else {"allow_buffer_reuse": False, _JOIN: KernelPass(fusion.join_late)}
    return {**PASSES, **own, **given, "custom_partitioner_fn": Partitioner(settings)}


@dataclass(frozen=True)
class Partitioner(compat.partitioner_base()):
    """:func:`gistkit.compiled.partitioner.cut` under settings, for ``options={"custom_partitioner_fn": ...}``."""

    settings: Settings

    def uuid(self) -> Any:
        """What PyTorch's caches of compiled graphs tell partitioners apart by."""
        return sources(), repr(self.settings)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> compat.Graphs:
        return cut(gm, joint_inputs, self.settings, **kwargs)


class ForTraced(compat.partitioner_base()):
    """Cuts graphs of compressed models (:mod:`gistkit.compiled.door`) as those ask, others as PyTorch does."""

    def uuid(self) -> Any:
        """As :meth:`Partitioner.uuid`; graphs without a compressed model are told apart by that alone."""
        settings = door.settings_in_force()
        return "plain" if settings is None else Partitioner(settings).uuid()

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> compat.Graphs:
        settings = door.settings_in_force()
        if settings is None:
            return compat.min_cut(gm, joint_inputs, **kwargs)
        with record.collected() as found:
            made = cut(gm, joint_inputs, settings, **kwargs)
        door.remember_traced(found)
        return made
