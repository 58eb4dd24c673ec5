"""Settings, result and picture of a training comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from struct import pack
from typing import Any

import torch

from gistkit.errors import quoted
from gistkit.ir import Plan
from gistkit.report import canvas, frame
from gistkit.runtime import LiveEvent

MIB = 2**20
COLOURS = ("#3b4252", "#0072b2", "#d55e00")
BOUNDS = {
    "steps": (3, 2**31),  # one to warm up, one to measure
    "batch": (1, 2**20),
    "image_size": (1, 2**14),
    "seed": (0, 2**63 - 1),
    "lr": (0, 1000),
    "momentum": (0, 1),
}


def check_settings(settings: Any, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raise ValueError where a number of the settings is out of its bounds, or their device is not there."""
    for name, (least, most) in bounds.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            got = quoted(value)
            raise ValueError(f"{name} must be from {least} to {most}, got {got}; leave it out for the default")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda is not there: torch.cuda.is_available() is False; use device cpu")


@dataclass(frozen=True)
class TrainSettings:
    """What to train on what; ``lossy`` names the third run's format, None leaves that run out. With a ``budget``
    (``"12GiB"``, ``"60%"`` of plain's peak) or a ``policy`` the one other run is under :func:`gistkit.plan`'s plan
    of the class ``fidelity``.

    The optimiser is SGD with Nesterov's momentum; ``lr`` is its highest learning rate, see ``loop.share_of_rate``.
    Raises ValueError where a number is out of range or the device is not there.
    """

    model: str
    data: str = "digits"
    steps: int = 50
    batch: int = 32
    image_size: int = 32
    lossy: str | None = "fp8"
    device: str = "cpu"
    seed: int = 0
    lr: float = 0.003
    momentum: float = 0.9
    budget: str | None = None
    policy: str | None = None
    fidelity: str = "bitwise"

    @property
    def planned(self) -> bool:
        return self.budget is not None or self.policy is not None

    def __post_init__(self) -> None:
        check_settings(self, BOUNDS)


@dataclass(frozen=True)
class RunResult:
    """One of the trainings: ``plain``, ``lossless``, the name of the lossy format or the plan's policy.

    ``kept_bytes``: live after the measured step's forward; ``peak_bytes``: most live at once in forward and backward;
    ``device_peak_bytes``: the same by CUDA's allocator, workspaces included, None elsewhere. ``step_s`` is a median,
    ``backward_s`` under a plan that of forward and backward alone. ``memory`` has the live bytes after every operator
    of that step. ``accuracy`` is on the result's ``tested``, None without any.
    """

    name: str
    kept_bytes: int
    peak_bytes: int
    device_peak_bytes: int | None
    step_s: float
    losses: tuple[float, ...]
    accuracy: float | None
    memory: tuple[LiveEvent, ...]
    backward_s: float | None = None

    @property
    def shown_peak_bytes(self) -> int:
        """The peak to compare by: device memory on CUDA, live tensor bytes elsewhere."""
        return self.peak_bytes if self.device_peak_bytes is None else self.device_peak_bytes


@dataclass(frozen=True)
class TrainResult:
    """All runs of one comparison; the first is plain, the second lossless or under the ``plan``. ``tested`` says which
    images the accuracy is of, none of which is trained on; None where there are none."""

    settings: TrainSettings
    environment: dict[str, Any]
    tested: str | None
    runs: tuple[RunResult, ...]
    plan: Plan | None = None

    @property
    def first_difference(self) -> int | None:
        """The first step whose second loss differs from the plain one in any bit; None where none does, or where plain
        PyTorch found no room."""
        if len(self.runs) < 2:
            return None
        plain, lossless = self.runs[:2]
        pairs = zip(plain.losses, lossless.losses, strict=True)
        return next((step for step, (a, b) in enumerate(pairs) if pack(">d", a) != pack(">d", b)), None)

    def to_json(self) -> str:
        """The result as JSON text, every loss to the bit; one that is not finite is null. With a plan it has ``plan``
        and ``step_s``, the seconds of forward and backward: ``gistkit plan --from-stats`` reads them."""
        runs = []
        for run in self.runs:
            losses = [x if math.isfinite(x) else None for x in run.losses]
            runs.append({**asdict(run), "losses": losses})
        fields = {"settings": asdict(self.settings), "environment": self.environment, "tested": self.tested}
        if self.plan is not None:
            fields |= {"plan": json.loads(self.plan.to_json()), "step_s": self.runs[-1].backward_s}
        return json.dumps({**fields, "first_difference": self.first_difference, "runs": runs})


def plot_memory(result: TrainResult, path: Path) -> None:
    """Draw live bytes over the measured step, a line a run, and write the picture. Overwrites ``path``.

    The runs execute different operators, so each run's forward and each run's backward is stretched to the same width.
    """
    figure, axes = canvas()
    plain, settings = result.runs[0], result.settings
    for run, colour in zip(result.runs, COLOURS, strict=False):
        _draw(axes, run, plain, colour)
    top = max(event.nbytes for run in result.runs for event in run.memory) / MIB
    frame(axes, 1, 2, top * 1.035, top * 1.1)
    axes.set_xticks([0, 1, 2], ["begin", "loss (dot: bytes kept for backward)", "end"])
    axes.set_xlabel("operators of one training step, each phase stretched to one width")
    axes.set_ylabel("live tensor bytes (MiB)")
    what = f"{settings.model}, batch {settings.batch}, {settings.image_size}x{settings.image_size}, {settings.device}"
    axes.set_title(f"{what}; without parameters, gradients, batch")
    # Below the axes, where no curve can run through it.
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path)


def _draw(axes: Any, run: RunResult, plain: RunResult, colour: str) -> None:
    # the forward's events spread evenly over 0 to 1, the backward's over 1 to 2
    events, forward = len(run.memory), sum(not event.backward for event in run.memory)
    x = [i / forward if i <= forward else 1 + (i - forward) / (events - forward) for i in range(events + 1)]
    y = [0.0, *(event.nbytes / MIB for event in run.memory)]
    kept, peak = f"kept {run.kept_bytes / MIB:.1f} MiB", f"peak {run.peak_bytes / MIB:.1f} MiB"
    if run is not plain:
        kept += f" ({plain.kept_bytes / run.kept_bytes:.1f}x less)"
        peak += f" ({plain.peak_bytes / run.peak_bytes:.1f}x less)"
    label = f"{run.name}: {kept}, {peak}"
    # The bytes hold until the next operator ends.
    axes.plot(x, y, drawstyle="steps-post", color=colour, linewidth=1.8, label=label)
    axes.fill_between(x, y, step="post", color=colour, alpha=0.08, linewidth=0)
    axes.plot([1], [run.kept_bytes / MIB], marker="o", color=colour, markersize=6, markeredgecolor="white", zorder=5)
