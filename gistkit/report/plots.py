"""Pictures by matplotlib (``gistkit[plot]``): a step's predicted memory by class, gradient errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gistkit.report.profile_view import TITLES, Profile
from gistkit.report.tables import MIB, mib

CLASS_COLOURS = {
    "weights": "#3b4252",
    "weight_gradients": "#8a94a6",
    "inputs": "#f0e442",
    "stashed": "#0072b2",
    "immediate": "#56b4e9",
    "gradient_maps": "#e69f00",
    "workspace": "#cc79a7",
}


def plot_profile(profile: Profile, path: Path) -> None:
    """Draw the bytes of every class over the tasks of one step, stacked, and write the picture. Overwrites ``path``."""
    figure, axes = canvas()
    shown = [
        name for name, values in profile.memory_bytes.items() if max(values, default=0) > 0.002 * profile.peak_bytes
    ]
    tasks = len(next(iter(profile.memory_bytes.values())))
    # the last one once more: a step begins at every point, and the last task has a width too
    stack = [[b / MIB for b in (*profile.memory_bytes[n], profile.memory_bytes[n][-1])] for n in shown]
    labels = [f"{TITLES[name]} ({profile.peak_class_bytes[name] / max(1, profile.peak_bytes):.0%})" for name in shown]
    colours = [CLASS_COLOURS[name] for name in shown]
    axes.stackplot(range(tasks + 1), stack, labels=labels, colors=colours, step="post", linewidth=0)
    top = profile.peak_bytes / MIB
    axes.plot([profile.peak_task + 0.5], [top], marker="v", color="black", markersize=6, clip_on=False, zorder=5)
    frame(axes, profile.backward_task, tasks, top * 1.04, top * 1.12)
    axes.set_xlabel("tasks of one training step, in order")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("predicted device memory (MiB)")
    axes.set_axisbelow(True)
    named = f"{profile.model}, " if profile.model else ""
    axes.set_title(
        f"{named}batch {profile.batch}, {profile.hardware}: plain PyTorch, peak {mib(profile.peak_bytes)} MiB"
    )
    figure.legend(loc="outside lower center", ncols=3, frameon=False, title="share of the peak in brackets")
    figure.savefig(path)


def canvas() -> tuple[Any, Any]:
    """A figure and its axes, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def frame(axes: Any, backward: float, end: float, label: float, top: float) -> None:
    """The limits, the grid and the two phases of a step, whose names stand at height ``label``."""
    axes.axvline(backward, color="#888888", linestyle="--", linewidth=1)
    for x, phase in ((backward / 2, "forward"), ((backward + end) / 2, "backward")):
        axes.text(x, label, phase, ha="center", va="bottom", color="#555555")
    axes.set_xlim(0, end)
    axes.set_ylim(0, top)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


LEAST = 1e-6
"""Errors below are drawn as this one."""


def plot_errors(rows: Sequence[str], columns: Sequence[str], errors: Sequence[Sequence[float]], path: Path) -> None:
    """Draw relative errors by row and column as colours, on a logarithmic scale, and write the picture. What is not
    finite is black. Overwrites ``path``."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    figure, axes = canvas()
    figure.set_size_inches(max(7.0, 3.5 + 0.22 * len(columns)), max(3.5, 2.2 + 0.22 * len(rows)))
    finite = [[e if math.isfinite(e) else math.nan for e in row] for row in errors]
    colours = colormaps["viridis"].with_extremes(bad="black")
    most = max((e for row in finite for e in row if e == e), default=1.0)
    drawn = [[max(e, LEAST) if e == e else e for e in row] for row in finite]
    image = axes.imshow(drawn, cmap=colours, norm=LogNorm(LEAST, max(most, 10 * LEAST)), aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.set_xlabel("gradient of layer")
    axes.set_ylabel("lossy stash, by itself")
    figure.colorbar(image, label="relative error (norm)")
    figure.savefig(path)
