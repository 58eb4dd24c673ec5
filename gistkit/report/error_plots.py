"""A picture of gradient errors, by matplotlib (``gistkit[plot]``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gistkit.report.planner_plots import canvas

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
