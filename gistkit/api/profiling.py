"""profile: where the memory and the time of a training step of plain PyTorch go.

| class | what (Gist, Fig. 1; vDNN, Fig. 4) |
|---|---|
| weights | parameters and buffers |
| weight_gradients | gradients of the parameters |
| inputs | what the caller gave and backward does not keep: targets, for example |
| stashed | feature maps that the forward makes and backward keeps; the kept input batch |
| immediate | feature maps that go within the forward |
| gradient_maps | gradients of feature maps |
| workspace | of convolutions, what operators make and free within themselves, what the device's libraries hold |

The stashed ones again (Gist, Fig. 3): ``relu_conv``, outputs of ReLUs that a convolution reads; ``relu_pool``, those
that a pool reads and no convolution; ``pool_index``, int64 indices of max-pools; ``other``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gistkit.api.measuring import Measure, captured, costs_of
from gistkit.ir import CONCAT, CONV, FORWARD, KINDS, Block, SavedGraph, by_key, layers
from gistkit.planning.cost import CostTable, Hardware, StepTimes
from gistkit.planning.policies import POLICIES
from gistkit.planning.simulate import Simulator, memory_bytes
from gistkit.report import LayerProfile, Profile

CLASSES = ("weights", "weight_gradients", "inputs", "stashed", "immediate", "gradient_maps", "workspace")
STASHES = ("relu_pool", "relu_conv", "pool_index", "other")
_OF_KIND = {
    "weight": "weights",
    "buffer": "weights",
    "weight_gradient": "weight_gradients",
    "gradient": "gradient_maps",
}
_JOINS, _CONVS = KINDS[CONCAT], KINDS[CONV]
_POOLS = ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d")


def profile(
    model: torch.nn.Module,
    *batch: Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    hardware: Hardware | str | Path | None = None,
    measure: Measure = False,
) -> Profile:
    """Where the memory and the time of a training step of ``model`` on ``batch`` go.

    Model, batch, ``loss_fn``, ``hardware`` and ``measure`` as :func:`gistkit.plan` takes them: real, fake or on the
    meta device. Nothing runs, and the seconds are predictions for the hardware; with ``measure`` they are measured ones
    (vDNN, Fig. 6), by running a few steps or from a file. Raises CaptureError where the step cannot be captured,
    MeasureError where it cannot be measured, ValueError or TypeError for an argument that makes no sense.
    """
    graph, device, times = captured("profile", model, batch, loss_fn, hardware, measure)
    return profile_graph(graph, costs_of(graph, device, times), type(model).__name__, times)


def profile_graph(graph: SavedGraph, costs: CostTable, name: str = "", times: StepTimes | None = None) -> Profile:
    """:func:`profile` of a captured step (with its tasks), on given costs; ``times``: the measured ones in them."""
    plain = POLICIES["plain"](graph, costs)
    simulator = Simulator(graph, costs)
    run, step = simulator.run(plain), simulator.profile(plain)
    of_block = {block.id: class_of(block) for block in graph.blocks}
    parts = by_key((of_block.get(i.block, "workspace"), i) for i in step.intervals)
    memory = {name: tuple(memory_bytes(parts[name], len(graph.tasks))) for name in CLASSES}
    most = {name: max(memory[name], default=0) for name in CLASSES}
    total = {
        name: most[name] if name == "workspace" else sum({i.block: i.nbytes for i in parts[name]}.values())
        for name in CLASSES
    }
    return Profile(
        model=name,
        hardware=costs.hardware.name,
        batch=graph.batch,
        peak_bytes=run.peak_bytes,
        peak_task=run.peak_task,
        step_s=run.step_s,
        backward_task=next((t.index for t in graph.tasks if t.phase != FORWARD), len(graph.tasks)),
        total_bytes=total,
        most_bytes=most,
        peak_class_bytes={name: memory[name][run.peak_task] for name in CLASSES},
        stashed_bytes=stashed_bytes(graph),
        memory_bytes=memory,
        layers=_layers(graph, costs, run.start_s),
        times=times,
    )


def class_of(block: Block) -> str:
    """The class of :data:`CLASSES` that a block counts to."""
    if block.kind in _OF_KIND:
        return _OF_KIND[block.kind]
    if block.saved >= 0:
        return "stashed"
    return "inputs" if block.kind == "input" else "immediate"


def stashed_bytes(graph: SavedGraph) -> dict[str, int]:
    """Bytes of the stashed feature maps by what makes and reads them (:data:`STASHES`; Gist, Fig. 3)."""
    found: dict[str, int] = {name: 0 for name in STASHES}
    for block in graph.blocks:
        if class_of(block) == "stashed":
            found[_stash_of(graph, block)] += block.nbytes
    return found


def _stash_of(graph: SavedGraph, block: Block) -> str:
    if block.storage < 0:
        return "other"
    if _from_relu(graph, block.storage):
        readers = _readers(graph, block.storage)
        return "relu_conv" if readers & {*_CONVS} else "relu_pool" if readers & {*_POOLS} else "other"
    last = graph.writers(block.storage)[-1:]
    return "pool_index" if last and last[0].op in _POOLS and block.dtype == "int64" else "other"


def _from_relu(graph: SavedGraph, storage: int) -> bool:
    """Whether a ReLU wrote the storage last, or a concatenation of such storages did."""
    last = graph.writers(storage)[-1:]
    if last and last[0].op in _JOINS and last[0].reads:
        return all(_from_relu(graph, part) for part in last[0].reads)
    return bool(last) and last[0].op == "relu"


def _readers(graph: SavedGraph, storage: int) -> set[str]:
    """The ops that read what a storage holds in the end, those of a concatenation with it among them."""
    last = graph.writers(storage)[-1].index
    found: set[str] = set()
    for call in graph.readers(storage):
        if call.index > last:
            found |= _readers(graph, call.writes[0]) if call.op in _JOINS and call.writes else {call.op}
    return found


def _layers(graph: SavedGraph, costs: CostTable, start_s: tuple[float, ...]) -> tuple[LayerProfile, ...]:
    def nbytes(ids: tuple[int, ...]) -> int:
        return sum(graph.blocks[i].nbytes for i in ids)

    found = []
    for layer in layers(graph):
        end_s = start_s[layer.forward] + costs.task_s(layer.forward)
        found.append(
            LayerProfile(
                module=layer.module,
                kind=layer.kind,
                op=layer.op,
                x_bytes=nbytes(layer.x),
                y_bytes=nbytes(tuple(b for b in layer.y if b not in layer.x)) or nbytes(layer.y),
                workspace_bytes=costs.workspace_bytes(layer.forward),
                weight_bytes=nbytes(layer.weights),
                forward_s=costs.task_s(layer.forward),
                backward_s=sum(costs.task_s(t) for t in layer.backward),
                reuse_s=start_s[layer.backward[0]] - end_s if layer.backward else None,
            )
        )
    return tuple(found)
