"""Training one network plain, lossless and lossy, or plain and under a plan, from the same start on the same batches.

What is compared: bytes kept for backward, the peak of live bytes over a step, step time, loss. Parameters, their
gradients, the optimiser's state and the batch are the same in every run and are not counted. Memory is measured in the
last step, which is left out of the times, as is the first, where a compressed model is captured.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gistkit import runtime
from gistkit.api import plan
from gistkit.errors import GistError, ModelError
from gistkit.ir import Plan
from gistkit.report import report
from gistkit.runtime import LiveBytes, compress, does_not_fit
from gistkit.training.data import ImageSet, batches, open_images, orders
from gistkit.training.result import RunResult, TrainResult, TrainSettings
from gistkit.version import VERSION
from gistkit.zoo import load

TEST_IMAGES = 512
WARM_UP = 0.1
OnStep = Callable[[str, int], None]


class Comparison:
    """The images looked at, the network built, the format checked: all that can be wrong with the settings shows here.

    Raises ValueError and TypeError for a bad model or format, DataError for bad images among those that the trainings
    draw, and for fewer images than a batch. With a budget or a policy what :func:`gistkit.plan` raises; ``plan`` is
    what it gave.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        compress(torch.nn.Identity(), lossy=settings.lossy)
        self._images, self._test_images = open_images(settings.data, settings.image_size)
        torch.manual_seed(settings.seed)
        self._model = load(settings.model, num_classes=len(self._images.classes), image_size=settings.image_size)
        self._images.check(_drawn(len(self._images.labels), settings))
        if self._test_images is not None:
            self._test_images.check(_tested(self._test_images).tolist())
        self.plan = _planned(self._model, self._images, settings) if settings.planned else None

    @property
    def names(self) -> tuple[str, ...]:
        if self.plan is not None:
            return "plain", self.plan.policy
        return ("plain", "lossless") if self._settings.lossy is None else ("plain", "lossless", self._settings.lossy)

    def run(self, on_step: OnStep = lambda name, done: None) -> TrainResult:
        """All trainings, one after the other. ``on_step(run name, steps done)`` is called as a run starts (0) and after
        every step.

        Waits for the device in every step. On CUDA, deterministic algorithms are on from here. Raises ModelError
        for a network that plain PyTorch cannot train on the images. Where a plan is tried and the device has no room
        for plain PyTorch, that run is missing.
        """
        settings, test_images = self._settings, self._test_images
        if settings.device == "cuda":
            be_deterministic()
        runs = tuple(run for run in (self._train(name, on_step) for name in self.names) if run is not None)
        tested = None if test_images is None else f"{len(_tested(test_images))} test images ({test_images.name})"
        return TrainResult(settings, environment(settings.device), tested, runs, self.plan)

    def _train(self, name: str, on_step: OnStep) -> RunResult | None:
        """One training. What fails in plain PyTorch is the network's fault, and is said as ModelError."""
        settings, plan = self._settings, None if name == "plain" else self.plan
        model = copy.deepcopy(self._model).to(settings.device)
        if plan is not None:
            model = compress(model, plan)
        elif name != "plain":
            model = compress(model, lossy=None if name == "lossless" else name)
        try:
            return self._run(name, model, on_step, plan)
        except Exception as error:
            if name == "plain" and self.plan is not None and does_not_fit(error):
                return None
            if name != "plain" or isinstance(error, GistError) or does_not_fit(error):
                raise
            size = settings.image_size
            raise ModelError(
                f"plain PyTorch cannot train {settings.model} on {settings.batch} images of {size}x{size} "
                f"({type(error).__name__}: {error}); mend it, or take another image_size"
            ) from error

    def _run(self, name: str, model: torch.nn.Module, on_step: OnStep, plan: Plan | None) -> RunResult:
        settings, images, test_images = self._settings, self._images, self._test_images
        gc.collect()
        torch.manual_seed(settings.seed)
        model.train()
        sgd = {"lr": settings.lr, "momentum": settings.momentum, "nesterov": settings.momentum > 0}
        optimizer = torch.optim.SGD(model.parameters(), **sgd)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, settings.steps))
        losses, times, backward_times = [], [], []
        parts = 1 if plan is None else plan.sub_batches
        memory: dict[str, Any] = {}
        on_step(name, 0)
        for number, batch in enumerate(batches(images, settings.batch, settings.steps, settings.seed)):
            x, targets = (tensor.to(settings.device) for tensor in batch)
            # Gradients keep their storage from step to step, so that the measured step makes none that stay.
            optimizer.zero_grad(set_to_none=False)
            begin = _now(settings.device)
            if number == settings.steps - 1:
                loss, memory = _measured(model, x, targets, len(images.classes), parts)
            elif parts > 1:
                loss = runtime.step(model, F.cross_entropy, x, targets)
            else:
                loss = class_loss(model(x), targets, len(images.classes))
                loss.backward()
            if plan is not None:
                backward_times.append(_now(settings.device) - begin)
            optimizer.step()
            rates.step()
            times.append(_now(settings.device) - begin)
            losses.append(loss.item())
            on_step(name, number + 1)
        accuracy = None if test_images is None else _accuracy(model, test_images, settings)
        backward_s = statistics.median(backward_times[1:-1]) if backward_times else None
        seconds = {"step_s": statistics.median(times[1:-1]), "backward_s": backward_s}
        return RunResult(name, **memory, **seconds, losses=tuple(losses), accuracy=accuracy)


def _planned(model: torch.nn.Module, images: ImageSet, settings: TrainSettings) -> Plan:
    """The plan of a step, with room for the gradients and the momentum that stay from step to step."""
    model = copy.deepcopy(model).to(settings.device).train()
    x = torch.zeros(settings.batch, 3, settings.image_size, settings.image_size, device=settings.device)
    targets = images.labels[: settings.batch].to(settings.device)
    stay_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad) * (1 + (settings.momentum > 0))
    words = {"budget": settings.budget, "policy": settings.policy or "optimal", "fidelity": settings.fidelity}
    return plan(model, x, targets, loss_fn=F.cross_entropy, reserved_bytes=stay_bytes, hold_output=False, **words)


def _drawn(count: int, settings: TrainSettings) -> set[int]:
    """Indices of the images that a training draws, of ``count``."""
    drawn: set[int] = set()
    for chosen in orders(count, settings.batch, settings.steps, settings.seed):
        drawn.update(chosen.tolist())
        if len(drawn) == count:
            break
    return drawn


def share_of_rate(step: int, steps: int) -> float:
    """The learning rate of a step, of the highest: a rise over the first tenth of the steps, and a cosine to 0."""
    return min((step + 1) / max(1, WARM_UP * steps), (1 + math.cos(math.pi * step / steps)) / 2)


def class_loss(scores: Any, targets: torch.Tensor, classes: int) -> torch.Tensor:
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


def _measured(
    model: torch.nn.Module, x: torch.Tensor, targets: torch.Tensor, classes: int, parts: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of one forward and backward, and its memory as :class:`RunResult` has it."""
    before_bytes = 0
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
    with LiveBytes() as live:
        if parts > 1:
            loss = runtime.step(model, F.cross_entropy, x, targets)
            kept_bytes = report(model).kept_bytes or 0
        else:
            loss = class_loss(model(x), targets, classes)
            kept_bytes = live.mark("forward end")
            loss.backward()
    device_bytes = torch.cuda.max_memory_allocated() - before_bytes if x.is_cuda else None
    found = {"kept_bytes": kept_bytes, "peak_bytes": live.peak_bytes, "device_peak_bytes": device_bytes}
    return loss, {**found, "memory": tuple(live.timeline)}


@torch.no_grad()
def _accuracy(model: torch.nn.Module, images: ImageSet, settings: TrainSettings) -> float:
    model.eval()
    chosen = _tested(images)
    right = 0
    for part in chosen.split(settings.batch):
        scores = model(images.inputs(part.tolist()).to(settings.device))
        right += int((scores.argmax(1).cpu() == images.labels[part]).sum())
    return right / len(chosen)


def _tested(images: ImageSet) -> torch.Tensor:
    """Indices of at most TEST_IMAGES, spread over the set: folders list one class after the other."""
    count = len(images.labels)
    return torch.linspace(0, count - 1, min(TEST_IMAGES, count)).long()


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def be_deterministic() -> None:
    """Deterministic algorithms on CUDA for the rest of the process: equal training needs them."""
    # cuBLAS reads it when its handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every new tensor would cost both sides time that no training pays.
    filling: Any = torch.utils.deterministic
    filling.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")


def environment(device: str) -> dict[str, Any]:
    """What figures depend on: versions, the device's name, CPU threads."""
    on_gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    return {
        "gistkit": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
