"""What convolutions and attentions need beside their results while they run, by a run of each on the GPU: cuDNN's
workspace, what an attention sums its gradients in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from gistkit.compiled import compat
from gistkit.compiled.split import is_tensor, memory_order, value

_WITH = "convol", "attention"  # the names of the operators have one of these


class Workspace:
    """Measures operators of a graph, equal ones once. ``channels_last``: images will lie so."""

    def __init__(self, channels_last: bool) -> None:
        self._last, self._known = channels_last, dict[str, int]()

    def bytes(self, node: fx.Node) -> int:
        """The most bytes that a node's operator has beside operands and results; 0 for other operators, and on a CPU.
        It runs with operands of anything and sets the GPU's ``max_memory_allocated`` back."""
        if not any(word in str(node.target) for word in _WITH):
            return 0
        devices = {value(n).device for n in node.all_input_nodes if is_tensor(n)}
        cuda = [device for device in devices if device.type == "cuda" and torch.cuda.is_available()]
        if not cuda:
            return 0
        key = str((node.target, map_arg((node.args, node.kwargs), _described)))
        if key not in self._known:
            self._known[key] = self._measured(node, cuda[0])
        return self._known[key]

    def operands(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a node's operator can be called with: tensors of anything, of the sizes and layouts it will be given."""
        return map_arg((node.args, node.kwargs), self._filled)

    def _measured(self, node: fx.Node, device: torch.device) -> int:
        run: Any = node.target
        with compat.outside_of_modes(), torch.no_grad():
            args, words = self.operands(node)
            run(*args, **words)  # cuDNN may time its algorithms in the first run
            torch.cuda.reset_peak_memory_stats(device)
            results = run(*args, **words)
            passing = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
            del results  # not before: what it makes is no workspace
        return passing

    def _filled(self, node: fx.Node) -> Any:
        if not is_tensor(node):
            return None if value(node) is None else compat.hint(value(node))
        x = value(node)
        sizes, strides = ([compat.hint(n) for n in numbers] for numbers in (x.shape, x.stride()))
        made = torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
        relaid = self._last and memory_order(x) == (0, 1, 2, 3)
        return made.to(memory_format=torch.channels_last) if relaid else made


def _described(node: fx.Node) -> Any:
    x = value(node)
    return (tuple(x.shape), x.stride(), x.dtype, x.device) if is_tensor(node) else x
