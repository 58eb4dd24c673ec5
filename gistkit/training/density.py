"""Densities over training (Gist, Fig. 14; cDMA's figures): the share of non-zero elements of every kept tensor that is
expected to have zeros, and what ``csr`` and ``zvc`` would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gistkit.capture import Recorder
from gistkit.codecs import CODECS, dtype_of
from gistkit.ir import Reading, SavedGraph, numel
from gistkit.planning.cost import Densities
from gistkit.report import canvas

LAYOUTS = ("zvc", "csr")
SHOWN = 24
"""Layers that the picture names, evenly spread over all."""


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


def plot_densities(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw density and compression ratios over the steps, a line a layer, early layers dark, and write the picture.
    Overwrites ``path``. Needs matplotlib (``gistkit[plot]``)."""
    from matplotlib import colormaps

    figure, axes = canvas()
    axes.remove()
    panels = figure.subplots(1, 3)
    panels[2].sharey(panels[1])
    layers = {row["storage"]: f"{row['module'] or 'model'} ({row['op']})" for row in rows}
    every = 1 + (len(layers) - 1) // SHOWN
    titles = {"density": "share of non-zero elements"} | {name: f"{name}: plain bytes / encoded" for name in LAYOUTS}
    for panel, (key, title) in zip(panels, titles.items(), strict=True):
        for i, (storage, name) in enumerate(layers.items()):
            points = [(row["step"], row[key]) for row in rows if row["storage"] == storage]
            colour = colormaps["viridis"](0.95 * i / max(1, len(layers) - 1))
            label = None if key in LAYOUTS or i % every else name
            panel.plot(*zip(*points, strict=True), color=colour, linewidth=1.3, label=label)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("training step")
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[1:]:
        panel.axhline(1.0, color="#888888", linestyle="--", linewidth=1)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=7)
    figure.savefig(path)
