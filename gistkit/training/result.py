"""Settings and result of a training comparison."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gistkit.errors import quoted
from gistkit.runtime import LiveEvent

LEAST_STEPS = 3
BOUNDS = {"batch": (1, 2**20), "image_size": (1, 2**14), "seed": (0, 2**63 - 1), "lr": (0, 1000), "momentum": (0, 1)}


@dataclass(frozen=True)
class TrainSettings:
    """What to train on what; ``lossy`` names the third run's format, None leaves that run out.

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

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise ValueError(
                f"steps must be at least {LEAST_STEPS} (one to warm up, one to measure), got {self.steps}; ask for more"
            )
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                got = quoted(value)
                raise ValueError(f"{name} must be from {least} to {most}, got {got}; leave it out for the default")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}; name one of the two")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda is not there: torch.cuda.is_available() is False; use device cpu")


@dataclass(frozen=True)
class RunResult:
    """One of the trainings: ``plain``, ``lossless`` or the name of the lossy format.

    ``kept_bytes``: live after the measured step's forward; ``peak_bytes``: most live at once in forward and backward;
    ``device_peak_bytes``: the same by CUDA's allocator, workspaces included, None elsewhere. ``step_s`` is a median.
    ``memory`` has the live bytes after every operator of that step. ``accuracy`` is on the result's ``tested``, None
    without any.
    """

    name: str
    kept_bytes: int
    peak_bytes: int
    device_peak_bytes: int | None
    step_s: float
    losses: tuple[float, ...]
    accuracy: float | None
    memory: tuple[LiveEvent, ...]

    @property
    def shown_peak_bytes(self) -> int:
        """The peak to compare by: device memory on CUDA, live tensor bytes elsewhere."""
        return self.peak_bytes if self.device_peak_bytes is None else self.device_peak_bytes


@dataclass(frozen=True)
class TrainResult:
    """All runs of one comparison; the first is plain, the second lossless. ``tested`` says which images the accuracy is
    of, none of which is trained on; None where there are none."""

    settings: TrainSettings
    environment: dict[str, Any]
    tested: str | None
    runs: tuple[RunResult, ...]

    @property
    def first_difference(self) -> int | None:
        """The first step whose lossless loss differs from the plain one in any bit; None where none does."""
        plain, lossless = self.runs[:2]
        pairs = zip(plain.losses, lossless.losses, strict=True)
        return next((step for step, (a, b) in enumerate(pairs) if _bits(a) != _bits(b)), None)

    def to_json(self) -> str:
        """The result as JSON text. ``losses_hex`` has each loss's float64 bits; a loss that is not finite is null."""
        runs = []
        for run in self.runs:
            losses = [x if math.isfinite(x) else None for x in run.losses]
            runs.append({**asdict(run), "losses": losses, "losses_hex": [_bits(x).hex() for x in run.losses]})
        fields = {"settings": asdict(self.settings), "environment": self.environment, "tested": self.tested}
        return json.dumps({**fields, "first_difference": self.first_difference, "runs": runs})


def _bits(value: float) -> bytes:
    return struct.pack(">d", value)
