"""Densities over training (Gist, Fig. 14; cDMA's figures): the share of non-zero elements of every kept tensor that is
expected to have zeros, and what ``csr`` and ``zvc`` would make of it."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.capture import Recorder
from gistkit.codecs import CODECS, dtype_of
from gistkit.ir import Reading, SavedGraph, numel
from gistkit.planning.cost import Densities

LAYOUTS = ("zvc", "csr")


def recorded(model: torch.nn.Module, x: torch.Tensor) -> tuple[Any, list[dict[str, Any]]]:
    """The model's output, as without, and the densities of this forward; waits for the device.

    A row a storage: its id, which is the key that ``gistkit.plan(density=)`` takes for a batch of this size, the
    operator and module that made it, ``elements``, ``density``, and ``zvc`` and ``csr``: plain bytes over encoded ones.
    """
    with Recorder(model) as recorder:
        out = model(x)
    graph = recorder.finish(out)
    return out, [_row(graph, storage) for storage in _with_zeros(graph)]


def _with_zeros(graph: SavedGraph) -> list[int]:
    """Kept storages whose producers speak for zeros: outputs of ReLUs, and of pools and dropouts behind them."""
    reading = Reading(graph)
    expected = Densities(reading, None)
    values = [reading.saved(s.id) for s in graph.kept() if s.density is not None]
    return [v.storage for v in values if v is not None and expected.expected((v.storage, v.version)) is not None]


def _row(graph: SavedGraph, storage: int) -> dict[str, Any]:
    s, writers = graph.storages[storage], graph.writers(storage)
    elements, dtype = numel(s), dtype_of(s.dtype)
    ratios = {name: s.nbytes / CODECS[name].predicted_bytes(elements, dtype, s.density) for name in LAYOUTS}
    origin = {"op": writers[-1].op, "module": writers[-1].module}
    return {"storage": storage, **origin, "elements": elements, "density": s.density, **ratios}
