"""The body of ``gistkit accuracy``: one network trained under several schemes and seeds, and its test accuracy.

SGD with momentum and weight decay, the learning rate of :func:`gistkit.training.loop.share_of_rate` (a rise over the
first tenth of the steps, then a cosine to 0), crops and, but for digits, flips (:mod:`.device_images`). A seed draws
the same parameters, orders, crops and dropout masks under every scheme. Nothing random lives longer than an epoch: all
generators are seeded by (seed, epoch), so a run that goes on from a checkpoint repeats the bits of one that was never
stopped, where the device repeats its own. On CUDA, convolutions compute in fp32, or with ``tf32`` in TF32, which rounds
their inputs to 10 bits of mantissa in every scheme alike. Steps are replayed there as one CUDA graph,
and what ``int4s`` and ``int2s`` draw follows from the run's seed and the values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from gistkit.api import plan
from gistkit.capture import Recorder, capture
from gistkit.codecs import CODECS, dtype_of
from gistkit.formats import AUTO
from gistkit.ir import Plan, Reading, SavedGraph, numel
from gistkit.planning.cost import Densities
from gistkit.report import report
from gistkit.runtime import Replayed
from gistkit.training.data import orders
from gistkit.training.device_images import DeviceImages, device_images, epoch_seed
from gistkit.training.loop import OnStep, be_deterministic, class_loss, environment, share_of_rate
from gistkit.training.records import Records, Row
from gistkit.training.result import check_settings
from gistkit.training.schemes import EXACT, IMMEDIATE, Scheme, carry_out, plan_of, scheme
from gistkit.training.verdict import SchemeResult, results
from gistkit.zoo import load

Figures = tuple[torch.Tensor, torch.Tensor]
"""What a step gives: its loss, and how many of its images were told right; both 0-d, on the device."""
Step = Callable[[torch.Tensor, torch.Tensor], Figures]
LAYOUTS = ("zvc", "csr")
BOUNDS = {
    "seeds": (1, 2**16),
    "epochs": (1, 2**20),
    "batch": (2, 2**20),
    "image_size": (1, 2**14),
    "lr": (0, 1000),
    "momentum": (0, 1),
    "weight_decay": (0, 1),
    "density": (0, 2**31),
}


@dataclass(frozen=True)
class AccuracySettings:
    """What to train under which ``schemes`` (:mod:`.schemes`), each with seeds 0 to ``seeds`` - 1. ``density``: steps
    from one measurement of densities to the next, in fp32's first seed; 0 for none. ``tf32``: convolutions on CUDA
    compute in TF32, as PyTorch's do where nothing is said. ``channels_last``: parameters and images are in that memory
    format.

    Raises ValueError where a number is out of range, the device is not there, a scheme does not exist or is named
    twice, and for densities without ``fp32``.
    """

    model: str
    data: str = "digits"
    schemes: tuple[str, ...] = (EXACT, "fp16", "fp10", "fp8", "fp8s", "immediate:fp8", "gradients:fp8")
    seeds: int = 3
    epochs: int = 10
    batch: int = 128
    image_size: int = 32
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    device: str = "cpu"
    density: int = 0
    tf32: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        check_settings(self, BOUNDS)
        for name in self.schemes:
            scheme(name)
        if not self.schemes or len(set(self.schemes)) < len(self.schemes):
            raise ValueError(f"schemes must be at least one, each once, got {','.join(self.schemes)!r}")
        if self.density and EXACT not in self.schemes:
            raise ValueError(f"density is measured in {EXACT}, got schemes {','.join(self.schemes)}; add {EXACT}")

    @property
    def about(self) -> Row:
        """The settings that all rows of a folder share: more schemes and seeds may join them later."""
        return {name: value for name, value in asdict(self).items() if name not in ("schemes", "seeds")}


@dataclass(frozen=True)
class _Run:
    """One training: a scheme, a seed, what changes from step to step, and a step's forward and backward."""

    scheme: Scheme
    seed: int
    model: torch.nn.Module
    sgd: torch.optim.SGD
    step: Step
    on_step: Callable[[int], None]

    def state(self) -> Row:
        return {"model": self.model.state_dict(), "sgd": self.sgd.state_dict()}


class Accuracy:
    """The experiment. All that can be wrong with settings, images, network and folder shows here, before any training.
    On CUDA, deterministic algorithms are on from here, and convolutions compute in TF32 where the settings say so, and
    only there. ``images``: training and test images that several experiments share (:func:`device_images`).

    Raises ValueError and TypeError for a bad model and a folder with rows of other settings
    (:class:`.records.Records`); DataError for an image that cannot be read, a class without images, no
    test images, fewer images than a batch; CaptureError where the network cannot be captured; PlanError where a scheme
    would round nothing; ModelError where the network returns no class scores.
    """

    def __init__(
        self, settings: AccuracySettings, out: Path, images: tuple[DeviceImages, DeviceImages] | None = None
    ) -> None:
        self.settings, self._schemes = settings, [scheme(name) for name in settings.schemes]
        images = images or device_images(settings.data, settings.image_size)
        next(orders(len(images[0]), settings.batch, 1, 0))  # raises where they are too few
        if settings.device == "cuda":
            be_deterministic()
            torch.backends.cudnn.allow_tf32 = settings.tf32
        self._format = torch.channels_last if settings.channels_last else torch.preserve_format
        self._train_images, self._test_images = (of.to(settings.device, self._format) for of in images)
        self._classes, self.tested = len(images[0].classes), len(images[1])
        self._plans = self._prepared()
        self._records = Records(out, settings.about, settings.epochs)
        self.steps = settings.epochs * (len(images[0]) // settings.batch)
        """Steps of one run."""

    def run(self, on_step: OnStep = lambda name, done: None) -> list[SchemeResult]:
        """Every run that is not done yet, the first seed of all schemes first; a result a scheme.

        ``on_step(scheme name, steps done of all its seeds)`` is called after every step.
        """
        settings = self.settings
        for seed in range(settings.seeds):
            for name in settings.schemes:
                self.train(name, seed, lambda done, name=name, seed=seed: on_step(name, seed * self.steps + done))
        return results(self._records.rows(), settings.schemes, settings.seeds)

    def _network(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        settings = self.settings
        model: Any = load(settings.model, self._classes, settings.image_size).to(settings.device).train()
        return model.to(memory_format=self._format)

    def _prepared(self) -> dict[str, Plan | None]:
        """The plan of every scheme; sets the figures of plain PyTorch. Runs two images exactly, and rounded at once."""
        settings, model = self.settings, self._network(0)
        x = torch.zeros(settings.batch, 3, settings.image_size, settings.image_size, device=settings.device)
        x = x.to(memory_format=self._format)
        graph = capture(model, (x,))
        self._plain_bytes, self._elements = graph.kept_bytes, sum(numel(s) for s in graph.kept())
        plans = {w.name: self._assigned(w) if w.codec == AUTO else plan_of(w, graph) for w in self._schemes}
        targets = torch.zeros(2, dtype=torch.int64, device=settings.device)
        for which in (Scheme(EXACT, EXACT, ""), *(w for w in self._schemes if w.kind == IMMEDIATE)):
            model = self._network(0)
            carry_out(which, None, model)
            class_loss(model(x[:2]), targets, self._classes)
        return plans

    def _assigned(self, which: Scheme) -> Plan:
        """The plan of ``lossy="auto"`` within the scheme's error for seed 0's network and first batch, not flipped."""
        x, targets = next(self._train_images.epoch(self.settings.batch, epoch_seed(0, 0), flip=False))
        words = {"policy": "gist", "lossy": AUTO, "max_error": which.max_error}
        return plan(self._network(0), x, targets, loss_fn=F.cross_entropy, **words)

    def train(self, name: str, seed: int, on_step: Callable[[int], None] = lambda done: None) -> None:
        """The run of one of the settings' schemes and any seed, if it is not done yet."""
        settings, which = self.settings, scheme(name)
        begin, state = self._records.resumed(which.name, seed, settings.device)
        on_step(begin * self.steps // settings.epochs)
        if begin == settings.epochs:
            return
        model = self._network(seed)
        carry_out(which, self._plans[which.name], model)
        words: dict[str, Any] = {"momentum": settings.momentum, "weight_decay": settings.weight_decay}
        sgd = torch.optim.SGD(model.parameters(), settings.lr, **words, fused=settings.device == "cuda")
        if state is not None:
            model.load_state_dict(state["model"])
            sgd.load_state_dict(state["sgd"])
        run = _Run(which, seed, model, sgd, self._step(which, model), on_step)
        for epoch in range(begin, settings.epochs):
            started = time.perf_counter()
            key = {"scheme": which.name, "seed": seed, "epoch": epoch}
            row = {**key, **self._epoch(run, epoch), "accuracy": self._accuracy(model), **self._kept(which, model)}
            row |= {"seconds": time.perf_counter() - started, "environment": environment(settings.device)}
            self._records.add(row, run.state)

    def _epoch(self, run: _Run, epoch: int) -> Row:
        """Figures and densities of one epoch. Waits for the device at its end, and where densities are measured."""
        settings, seed = self.settings, epoch_seed(run.seed, epoch)
        if settings.device == "cuda":  # a graph holds the codecs' seed, which is the CPU's: one for the whole run
            torch.manual_seed(run.seed)
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        batches = self._train_images.epoch(settings.batch, seed, flip=settings.data != "digits")
        every = settings.density if run.scheme.kind == EXACT and run.seed == 0 else 0
        densities: list[Row] = []
        all_figures: list[Figures] = []
        for step, (x, targets) in enumerate(batches, epoch * self.steps // settings.epochs):
            for group in run.sgd.param_groups:
                group["lr"] = settings.lr * share_of_rate(step, self.steps)
            run.sgd.zero_grad()
            if every and step % every == 0:
                figures, found = self._recorded(run.model, x, targets)
                densities += [{"step": step, **row} for row in found]
            else:
                figures = run.step(x, targets)
            run.sgd.step()
            all_figures.append(figures)
            run.on_step(step + 1)
        losses, right = map(torch.stack, zip(*all_figures, strict=True))
        loss, trained = losses.mean().item(), right.sum().item() / (len(right) * settings.batch)
        return {"loss": loss if math.isfinite(loss) else None, "train_accuracy": trained, "densities": densities}

    def _step(self, which: Scheme, model: torch.nn.Module) -> Step:
        """Forward and backward; on CUDA as a graph, but for sparse storages, of which a graph knows no size."""
        plan = self._plans[which.name]
        sparse = plan is not None and any(d.form.sparse for d in plan.decisions)

        def step(x: torch.Tensor, targets: torch.Tensor) -> Figures:
            return self._backward(model(x), targets)

        return step if sparse else Replayed(model, step)

    def _recorded(self, model: torch.nn.Module, x: torch.Tensor, targets: torch.Tensor) -> tuple[Figures, list[Row]]:
        """A step as it is, and its densities. No node of its backward is left, as PyTorch would use those of the
        parameters again in a graph's capture, on the stream that they were made on."""
        scores, found = recorded(model, x)
        return self._backward(scores, targets), found

    def _backward(self, scores: Any, targets: torch.Tensor) -> Figures:
        loss = class_loss(scores, targets, self._classes)
        loss.backward()
        return loss.detach(), (scores.detach().argmax(1) == targets).sum()

    @torch.no_grad()
    def _accuracy(self, model: torch.nn.Module) -> float:
        model.eval()
        batches = self._test_images.whole(self.settings.batch)
        right = [(model(x).argmax(1) == targets).sum() for x, targets in batches]
        model.train()
        return torch.stack(right).sum().item() / self.tested

    def _kept(self, which: Scheme, model: torch.nn.Module) -> Row:
        """``kept_bytes``: what a step holds for backward when its forward ends, parameters left out, as
        ``gistkit.report`` has it. ``bits``: 8 times that over the elements of all tensors that plain PyTorch holds then
        (int64 indices are one element each), so masks, maps, scales and what stays as it is are in it; 32 for fp32, but
        for such indices. Both are None for the controls."""
        plain = {"plain_bytes": self._plain_bytes}
        if self._plans[which.name] is None and which.kind != EXACT:
            return {**plain, "kept_bytes": None, "bits": None}
        found = None if which.kind == EXACT else report(model).kept_bytes
        kept_bytes = self._plain_bytes if found is None else found
        return {**plain, "kept_bytes": kept_bytes, "bits": 8 * kept_bytes / self._elements}


def recorded(model: torch.nn.Module, x: torch.Tensor) -> tuple[Any, list[dict[str, Any]]]:
    """The model's output, as without, and the densities of this forward (as in Gist's Fig. 14); waits for the device.

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
