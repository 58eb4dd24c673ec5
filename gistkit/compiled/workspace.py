"""What a step takes on a GPU beside its tensors' own bytes: what convolutions and attentions need while they run, by a
run of each (cuDNN's workspace, attentions' sums), and what the allocator leaves unused (ResNet-50: 15 MiB)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from gistkit.compiled import compat
from gistkit.compiled.split import is_tensor, memory_order, storages, value
from gistkit.planning.fused_kernels import block_bytes

_MEASURED = "aten.convolution", "gistkit.convolved", "aten._scaled_dot_product_"
"""How names of operators that are run begin. None of them reads memory by the values of its operands."""

_ALIGNED = 8  # elements, Inductor's sdpa_constraint


class Workspace:
    """Measures operators of a step's graphs, equal ones once. ``inputs``: forward's; without a GPU among their devices
    nothing is counted. ``channels_last``: images will lie so."""

    def __init__(self, inputs: Iterable[fx.Node], channels_last: bool) -> None:
        self._last, self._known = channels_last, dict[str, int]()
        self._on_gpu = torch.cuda.is_available() and any(value(n).is_cuda for n in filter(is_tensor, inputs))

    def blocks(self, nodes: Iterable[Any]) -> dict[int, int]:
        """The storages of those nodes that stand for a tensor, with the bytes that the allocator takes for them."""
        return {key: block_bytes(size) if self._on_gpu else size for key, size in storages(nodes).items()}

    def bytes(self, node: fx.Node) -> int:
        """The most bytes that a node's operator has beside operands and results; 0 for other operators, and on a CPU.
        It runs with operands of anything and sets the GPU's ``max_memory_allocated`` back."""
        measured = self._on_gpu and str(node.target).startswith(_MEASURED)
        devices = [value(n).device for n in node.all_input_nodes if measured and is_tensor(n) and value(n).is_cuda]
        if not devices:
            return 0
        key = str((node.target, map_arg((node.args, node.kwargs), _described)))
        if key not in self._known:
            self._known[key] = self._measured(node, devices[0])
        return self._known[key]

    def operands(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a node's operator can be called with: tensors of anything, of the sizes and layouts it will be given."""
        last, named = self._last and "attention" not in str(node.target), compat.operands(node)
        bias = named.get("attn_bias", named.get("attn_mask"))
        return map_arg((node.args, node.kwargs), lambda n: _filled(n, last, n is bias))

    def _measured(self, node: fx.Node, device: torch.device) -> int:
        run: Any = node.target
        real = compat.part("_disable_current_modes")()  # no fake tensors, though a graph of these is being traced
        with real, torch.no_grad(), torch.random.fork_rng([device], device_type="cuda"):
            args, words = self.operands(node)
            run(*args, **words)  # cuDNN may time its algorithms in the first run
            torch.cuda.reset_peak_memory_stats(device)
            results = run(*args, **words)
            passing = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
            del results  # not before: what it makes is no workspace
        return passing


def _filled(node: fx.Node, channels_last: bool, aligned: bool) -> Any:
    """What stands for an operand. ``channels_last``: images lie so, whatever its strides say. ``aligned``: each stride
    is a multiple of ``_ALIGNED``, as Inductor lays out an attention's mask."""
    if not is_tensor(node):
        return None if value(node) is None else compat.hint(value(node))
    x = value(node)
    sizes, strides = ([compat.hint(n) for n in numbers] for numbers in (x.shape, x.stride()))
    strides = [-(-n // _ALIGNED) * _ALIGNED if aligned and n > 1 else n for n in strides]
    made = torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)
    if not x.is_floating_point():  # the seed of an attention's dropout
        made.zero_()
    return made.to(memory_format=torch.channels_last) if channels_last and memory_order(x) == (0, 1, 2, 3) else made


def _described(node: fx.Node) -> Any:
    x = value(node)
    return (tuple(x.shape), x.stride(), x.dtype, x.device) if is_tensor(node) else x
