"""Training one network three times, plain, lossless and lossy, from the same start on the same batches.

What is compared: bytes kept for backward, the peak of live bytes over a step, step time, loss. Parameters, their
gradients, the optimiser's state and the batch are the same in every run and are not counted. Memory is measured in the
last step, which is left out of the times, as is the first, where a compressed model is captured.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import platform
import statistics
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.errors import ModelError
from gistkit.runtime import LiveBytes, LiveEvent, compress
from gistkit.training.data import ImageSet, batches, inputs, open_images
from gistkit.version import VERSION
from gistkit.zoo import load

LEAST_STEPS = 3
TEST_IMAGES = 256
OnStep = Callable[[str, int], None]


@dataclass(frozen=True)
class TrainSettings:
    """What to train on what; ``lossy`` names the third run's format, None leaves that run out.

    Raises ValueError where a number is out of range or the device is not there.
    """

    model: str
    data: str = "digits"
    steps: int = 20
    batch: int = 32
    image_size: int = 32
    lossy: str | None = "fp8"
    device: str = "cpu"
    seed: int = 0
    lr: float = 0.01
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.steps < LEAST_STEPS:
            raise ValueError(
                f"steps must be at least {LEAST_STEPS} (one to warm up, one to measure), got {self.steps}; ask for more"
            )
        for name in ("batch", "image_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}; leave it out for the default")
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise ValueError(f"lr must be a finite number of at least 0, got {self.lr}; 0.01 is the default")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}; name one of the two")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda is not there: torch.cuda.is_available() is False; use device cpu")


@dataclass(frozen=True)
class RunResult:
    """One of the trainings: ``plain``, ``lossless`` or the name of the lossy format.

    ``kept_bytes``: live after the measured step's forward; ``peak_bytes``: most live at once in forward and backward;
    ``device_peak_bytes``: the same by CUDA's allocator, workspaces included, None elsewhere. ``step_s`` is a median.
    ``memory`` has the live bytes after every operator of that step. ``accuracy`` is on up to 256 test images, None
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
    """All runs of one comparison; the first is plain, the second lossless."""

    settings: TrainSettings
    environment: dict[str, Any]
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
        fields = {"settings": asdict(self.settings), "environment": self.environment}
        return json.dumps({**fields, "first_difference": self.first_difference, "runs": runs})


def train(
    settings: TrainSettings,
    compress: Callable[..., torch.nn.Module] = compress,
    on_step: OnStep = lambda name, done: None,
) -> TrainResult:
    """Carry out the comparison. ``on_step(run name, steps done)`` is called as a run starts (0) and after every step.

    ``compress(model, lossy=...)`` stands for :func:`gistkit.compress`. Waits for the device in every step. On CUDA,
    deterministic algorithms are on meanwhile. Raises ValueError and TypeError for a bad model or format, DataError for
    bad images, all of them before the first step, but for an image that turns out unreadable, and ModelError for a
    network whose scores are none.
    """
    return Comparison(settings, compress).run(on_step)


class Comparison:
    """The images opened, the network built, the format checked: all that can be wrong with the settings shows here.

    Arguments and errors as for :func:`train`.
    """

    def __init__(self, settings: TrainSettings, compress: Callable[..., torch.nn.Module] = compress) -> None:
        self._settings = settings
        self._compress = compress
        self._images, self._test_images = open_images(settings.data, settings.image_size)
        next(batches(self._images, settings.batch, 1, settings.seed))
        torch.manual_seed(settings.seed)
        self._model = load(settings.model, num_classes=len(self._images.classes), image_size=settings.image_size)
        self._compress(torch.nn.Identity(), lossy=settings.lossy)

    @property
    def names(self) -> tuple[str, ...]:
        """The runs, in order."""
        return ("plain", "lossless") if self._settings.lossy is None else ("plain", "lossless", self._settings.lossy)

    def run(self, on_step: OnStep) -> TrainResult:
        """All trainings, one after the other; ``on_step`` as for :func:`train`."""
        settings = self._settings
        with _deterministic(settings.device):
            runs = tuple(
                _run(name, self._copy(name), self._images, self._test_images, settings, on_step) for name in self.names
            )
        return TrainResult(settings, _environment(settings.device), runs)

    def _copy(self, name: str) -> torch.nn.Module:
        model = copy.deepcopy(self._model).to(self._settings.device)
        return model if name == "plain" else self._compress(model, lossy=None if name == "lossless" else name)


def _run(
    name: str,
    model: torch.nn.Module,
    images: ImageSet,
    test_images: ImageSet | None,
    settings: TrainSettings,
    on_step: OnStep,
) -> RunResult:
    gc.collect()
    torch.manual_seed(settings.seed)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    losses, times = [], []
    meter = _Meter(settings.device)
    on_step(name, 0)
    for step, batch in enumerate(batches(images, settings.batch, settings.steps, settings.seed)):
        x, targets = (tensor.to(settings.device) for tensor in batch)
        # Gradients keep their storage from step to step, so that the measured step makes none that stay.
        optimizer.zero_grad(set_to_none=False)
        begin = _now(settings.device)
        if step < settings.steps - 1:
            loss = _loss(model(x), targets, len(images.classes))
            loss.backward()
        else:
            loss = meter.step(model, x, targets, len(images.classes))
        optimizer.step()
        times.append(_now(settings.device) - begin)
        losses.append(loss.item())
        on_step(name, step + 1)
    accuracy = None if test_images is None else _accuracy(model, test_images, settings)
    step_s = statistics.median(times[1:-1])
    return RunResult(
        name,
        meter.kept_bytes,
        meter.live.peak_bytes,
        meter.device_peak_bytes,
        step_s,
        tuple(losses),
        accuracy,
        tuple(meter.live.timeline),
    )


def _loss(scores: Any, targets: torch.Tensor, classes: int) -> torch.Tensor:
    """The cross entropy of class scores. Raises ModelError for what are none, or need no gradient."""
    shape = tuple(scores.shape) if isinstance(scores, torch.Tensor) else ()
    if len(shape) != 2 or shape[0] != len(targets) or shape[1] < classes:
        raise ModelError(
            f"the model must return class scores, for {len(targets)} images of {classes} classes a tensor of shape "
            f"({len(targets)}, {classes}), got {shape or type(scores).__name__}; give a factory whose network does, it "
            "is given num_classes"
        )
    if not scores.requires_grad:
        raise ModelError("the model's scores must need a gradient, and no parameter leads to them; train at least one")
    return F.cross_entropy(scores, targets)


class _Meter:
    """One forward and backward with its memory measured."""

    def __init__(self, device: str) -> None:
        self.live = LiveBytes()
        self.kept_bytes = 0
        self.device_peak_bytes: int | None = None
        self._on_cuda = device == "cuda"

    def step(self, model: torch.nn.Module, x: torch.Tensor, targets: torch.Tensor, classes: int) -> torch.Tensor:
        before_bytes = 0
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
            before_bytes = torch.cuda.memory_allocated()
        with self.live:
            loss = _loss(model(x), targets, classes)
            self.kept_bytes = self.live.mark("forward end")
            loss.backward()
        if self._on_cuda:
            self.device_peak_bytes = torch.cuda.max_memory_allocated() - before_bytes
        return loss


@torch.no_grad()
def _accuracy(model: torch.nn.Module, images: ImageSet, settings: TrainSettings) -> float:
    model.eval()
    count = min(TEST_IMAGES, len(images.labels))
    # Spread over the set: the folders list one class after the other.
    chosen = torch.linspace(0, len(images.labels) - 1, count).long()
    right = 0
    for part in chosen.split(settings.batch):
        scores = model(inputs(images, part.tolist()).to(settings.device))
        right += int((scores.argmax(1).cpu() == images.labels[part]).sum())
    return right / count


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _bits(value: float) -> bytes:
    return struct.pack(">d", value)


@contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """Deterministic algorithms on CUDA, where equal training needs them; the CPU's are deterministic anyway."""
    if device == "cpu":
        yield
        return
    # cuBLAS reads it when its handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    fill, benchmark = filling.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling every new tensor would cost both sides time that no training pays.
        filling.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark


def _environment(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "gistkit": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
