"""Pictures of a training comparison, by matplotlib (``gistkit[plot]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gistkit.report import canvas, frame
from gistkit.runtime import LiveEvent
from gistkit.training.result import RunResult, TrainResult

MIB = 2**20
COLOURS = ("#3b4252", "#0072b2", "#d55e00")


def plot_memory(result: TrainResult, path: Path) -> None:
    """Draw live bytes over the measured step, a line a run, and write the picture. Overwrites ``path``.

    The runs execute different operators, so each run's forward and each run's backward is stretched to the same width.
    """
    figure, axes = canvas()
    plain = result.runs[0]
    for run, colour in zip(result.runs, COLOURS, strict=False):
        _draw(axes, run, plain, colour)
    top = max(event.nbytes for run in result.runs for event in run.memory) / MIB
    _decorate(axes, result, top)
    # Below the axes, where no curve can run through it.
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path)


def step_curve(memory: Sequence[LiveEvent]) -> tuple[list[float], list[float]]:
    """(positions, MiB) of a step's events: the forward spread evenly over 0 to 1, the backward over 1 to 2."""
    counts = [sum(event.backward == backward for event in memory) for backward in (False, True)]
    x, y, seen = [0.0], [0.0], [0, 0]
    for event in memory:
        seen[event.backward] += 1
        x.append(event.backward + seen[event.backward] / counts[event.backward])
        y.append(event.nbytes / MIB)
    return x, y


def _draw(axes: Any, run: RunResult, plain: RunResult, colour: str) -> None:
    x, y = step_curve(run.memory)
    kept, peak = f"kept {run.kept_bytes / MIB:.1f} MiB", f"peak {run.peak_bytes / MIB:.1f} MiB"
    if run is not plain:
        kept += f" ({plain.kept_bytes / run.kept_bytes:.1f}x less)"
        peak += f" ({plain.peak_bytes / run.peak_bytes:.1f}x less)"
    label = f"{run.name}: {kept}, {peak}"
    # The bytes hold until the next operator ends.
    axes.plot(x, y, drawstyle="steps-post", color=colour, linewidth=1.8, label=label)
    axes.fill_between(x, y, step="post", color=colour, alpha=0.08, linewidth=0)
    axes.plot([1], [run.kept_bytes / MIB], marker="o", color=colour, markersize=6, markeredgecolor="white", zorder=5)


def _decorate(axes: Any, result: TrainResult, top: float) -> None:
    settings = result.settings
    frame(axes, 1, 2, top * 1.035, top * 1.1)
    axes.set_xticks([0, 1, 2], ["begin", "loss (dot: bytes kept for backward)", "end"])
    axes.set_xlabel("operators of one training step, each phase stretched to one width")
    axes.set_ylabel("live tensor bytes (MiB)")
    what = f"{settings.model}, batch {settings.batch}, {settings.image_size}x{settings.image_size}, {settings.device}"
    axes.set_title(f"{what}; without parameters, gradients, batch")
