"""Training that does not wait for the device: step time, the host's share of it and memory, plain beside gistkit.

    python -m bench.training --out bench/results/NAME.jsonl [--models resnet50,regnety_016] [--confs bf16,fp32]

Networks of timm, or of :mod:`bench.networks` and the zoo where timm has none of that name. ``bf16``: autocast,
channels_last, batch 128; ``fp32``: batch 64; SGD with momentum. A row's ``step_ms`` is a run of steps without a
synchronisation among them, by their number, the median of the runs on a quiet core (:mod:`bench.pace`; the variants'
runs alternate); ``host_ms`` the same with eight images of 64x64, where the host alone sets the pace (issued to a device
that sleeps, two steps are more launches than CUDA queues: the host waits), ``loop_ms`` the core's pace in these runs;
``kept_mib`` and ``peak_mib`` the CUDA allocator's, less what the step began with; ``first_s`` the first three steps.
``--graph`` compresses without sparse forms and also replays forward and backward as one CUDA graph: ``graph_ms`` a step
with its optimiser, ``graph_mib`` the memory that the graph holds, ``graph_equal`` whether its loss is the step's.
``--profile DIR`` also writes the host's profile of each row's steps. ``--device cpu`` tries it out.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gistkit
from bench.networks import densenet121
from bench.pace import Timings
from bench.rows import beside, environment, utc
from gistkit import zoo
from gistkit.benchmark.measure import MIB
from gistkit.runtime.step.graphed import WARM_UP as BEFORE_CAPTURE

MODELS = ("resnet50", "vgg16", "efficientnet_b0", "vit_small_patch16_224", "densenet121", "regnety_016")
CONFS = {"bf16": 128, "fp32": 64}
WARM_UP, TIMED, RUNS, HOST_STEPS, HOST_BATCH = 22, 20, 7, 4, 8


def network(name: str) -> torch.nn.Module:
    """timm's network, else the bench's, else the zoo's."""
    try:
        import timm  # pyright: ignore[reportMissingImports]

        return timm.create_model(name)
    except (ImportError, RuntimeError):
        return densenet121() if name == "densenet121" else zoo.load(name, num_classes=1000, image_size=224)


class Stepper:
    """One network's training steps of one variant, on images of that number and size."""

    def __init__(self, name: str, conf: str, variant: str, options: argparse.Namespace, batch: int, image: int) -> None:
        torch.manual_seed(0)
        self._device, self._narrow = options.device, conf == "bf16"
        model: Any = network(name).to(options.device).train()
        self.x = torch.randn(batch, 3, image, image, device=options.device)
        if self._narrow:
            model = model.to(memory_format=torch.channels_last)
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.targets = torch.randint(1000, (batch,), device=options.device)
        if variant != "plain":
            lossy = None if variant == "gistkit" else variant.removeprefix("gistkit ")
            model = gistkit.compress(model, lossy=lossy, sparse=not options.graph)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self._device, torch.bfloat16) if self._narrow else nullcontext()

    def computed(self, after_forward: Callable[[], Any] = lambda: None) -> torch.Tensor:
        """Forward and backward; the loss."""
        with self.autocast():
            loss = F.cross_entropy(self.model(self.x), self.targets)
        after_forward()
        loss.backward()
        return loss.detach()

    def __call__(self, after_forward: Callable[[], Any] = lambda: None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.computed(after_forward)
        self.optimizer.step()


class Variant:
    """One variant of a network: its steps of the whole batch, and those of so few small images that the host alone sets
    the pace."""

    def __init__(
        self, name: str, conf: str, variant: str, options: argparse.Namespace, drain: Callable[[], Any]
    ) -> None:
        self.name, self._options, self._drain = variant, options, drain
        self.step = Stepper(name, conf, variant, options, options.batch or CONFS[conf], options.image)
        self.first_s = [round(_seconds(self.step, drain), 3) for _ in range(3)]
        image = options.image if name.startswith("vit") else options.host_image  # timm's take one size
        self._small = Stepper(name, conf, variant, options, HOST_BATCH, image)
        for step in (self.step, self._small):
            for _ in range(options.warm_up):
                step()
        self._taken, self._host = Timings(), Timings()
        drain()

    def run(self) -> None:
        """A run of either kind of step, without a synchronisation within."""
        for step, timings in ((self.step, self._taken), (self._small, self._host)):
            timings.take(lambda step=step: (*(step() for _ in range(self._options.steps)), self._drain()))

    def figures(self) -> dict[str, Any]:
        """Those of its row."""
        options, drain, steps = self._options, self._drain, self._options.steps
        found: dict[str, Any] = {"first_s": self.first_s, "step_ms": 1e3 * self._taken.median / steps}
        found |= {"host_ms": 1e3 * self._host.median / steps, **self._host.figures}
        found["waited_ms"] = 1e3 * min(_seconds(self.step, drain) for _ in range(steps))
        if options.device != "cuda":
            return found
        found |= _memory(self.step, self.step.optimizer)
        return found | (_graphed(self.step, options, drain) if options.graph else {})


def compared(name: str, conf: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of each variant's row. Their runs alternate, so that what the machine does beside meets all alike."""
    drain: Callable[[], Any] = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    variants = [Variant(name, conf, variant, options, drain) for variant in options.variants.split(",")]
    for _ in range(RUNS):
        for variant in variants:
            variant.run()
    for variant in variants:
        yield variant.name, variant.figures()
        if options.profile:
            _profile(variant.step, drain, options.profile / f"{name}-{conf}-{variant.name.replace(' ', '-')}.txt")


def _graphed(step: Stepper, options: argparse.Namespace, drain: Callable[[], Any]) -> dict[str, Any]:
    """The same forward and backward as a CUDA graph."""
    expected, graphed = step.computed(), gistkit.GraphedStep(step.model, F.cross_entropy)

    def replay() -> torch.Tensor:
        step.optimizer.zero_grad(set_to_none=True)
        with step.autocast():
            return graphed(step.x, step.targets)

    found = [replay() for _ in range(BEFORE_CAPTURE + 2)]
    assert graphed.graph_bytes
    work = lambda: [(replay(), step.optimizer.step()) for _ in range(options.steps)]  # noqa: E731
    work()
    figures = {"graph_mib": graphed.graph_bytes / MIB, "graph_equal": all(torch.equal(f, expected) for f in found)}
    return {"graph_ms": 1e3 * _seconds(work, drain) / options.steps, **figures}


def _seconds(work: Callable[[], Any], drain: Callable[[], Any]) -> float:
    drain()
    begun = time.perf_counter()
    work()
    drain()
    return time.perf_counter() - begun


def _profile(step: Callable[[], Any], drain: Callable[[], Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = cProfile.Profile()
    drain()
    profile.enable()
    for _ in range(HOST_STEPS):
        step()
    profile.disable()
    drain()
    with open(path, "w", encoding="utf-8") as file:
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(70)


def _memory(step: Callable[..., None], optimizer: torch.optim.Optimizer) -> dict[str, float]:
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    before, kept = torch.cuda.memory_allocated(), []
    torch.cuda.reset_peak_memory_stats()
    step(lambda: kept.append(torch.cuda.memory_allocated() - before))
    torch.cuda.synchronize()
    return {"kept_mib": kept[0] / MIB, "peak_mib": (torch.cuda.max_memory_allocated() - before) / MIB}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.training", description="Training that does not wait for the device.")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--confs", default=",".join(CONFS), help="comma-separated: bf16, fp32")
    parser.add_argument("--variants", default="plain,gistkit", help="plain, gistkit, 'gistkit fp8s', ...")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batch", type=int, default=0, help="instead of the configuration's")
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument(
        "--host-image", type=int, default=64, help="size of the images that the host's time is taken with"
    )
    parser.add_argument("--steps", type=int, default=TIMED)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="plans are made anew after steps 5, 10 and 20")
    parser.add_argument("--graph", action="store_true", help="also replay each step as a CUDA graph")
    parser.add_argument("--profile", type=Path, help="folder for the host's profiles")
    parser.add_argument("--max-s", type=float, default=float("inf"), help="begin no row after so many seconds")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where a row failed."""
    options, failed, deadline = arguments(argv), False, time.monotonic()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    deadline += options.max_s
    with open(options.out, "w", encoding="utf-8") as file:
        for model in options.models.split(","):
            for conf in options.confs.split(","):
                if time.monotonic() > deadline:
                    print(f"bench.training: not run: {model} {conf}", file=sys.stderr)
                    continue
                plain: dict[str, Any] = {}
                base = {"kind": "training", "time_utc": utc(), **environment(options.device)}
                base |= {"model": model, "conf": conf}
                try:
                    for variant, figures in compared(model, conf, options):
                        row = {**base, "variant": variant, **figures}
                        plain = row if variant == "plain" else plain
                        file.write(json.dumps(row) + "\n")
                        file.flush()
                        print(_line(row, plain), flush=True)
                except Exception as error:
                    failed = True
                    file.write(json.dumps({**base, "error": f"{type(error).__name__}: {error}"}) + "\n")
                    print(f"{model} {conf}: {type(error).__name__}: {error}", flush=True)
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    return int(failed)


def _line(row: dict[str, Any], plain: dict[str, Any]) -> str:
    text = beside(row, plain, ("step_ms", "host_ms", "in_loops", "kept_mib", "peak_mib"))
    quiet = f"{row['quiet_runs']} of {row['runs']} runs on a quiet core"
    return f"{row['model']} {row['conf']} {row['variant']}: {text}, {quiet}, first steps {row['first_s']} s"


if __name__ == "__main__":
    sys.exit(main())
