"""Training steps side by side: plain PyTorch, its own ways to save memory, and gistkit.

    python -m bench.steps --device cuda --out bench/results/NAME.jsonl [--models vgg16,resnet50] [--batch 64]

A step is forward, cross-entropy, backward, SGD with momentum. Times are medians over ``--steps`` steps after those for
warming up (compilation and capture happen there). Memory is of one step, minus what was allocated before it began
(parameters, momentum, inputs; gradients are None then): ``kept_bytes`` at the end of the forward, ``peak_bytes`` at
most. On CUDA both are the caching allocator's, elsewhere live tensor bytes. Every variant begins from the same
parameters and sees the same batch. ``loss_equals_plain`` is bit equality of the losses of the first three steps, which
run with deterministic cuDNN algorithms; the later ones run with whatever cuDNN picks. ``notes`` are the report's of the
last step: counts that the host has waited for, storages that were denser than forecast.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import gistkit
from bench.rows import environment, utc
from bench.variants import VARIANTS, Variant
from gistkit import zoo
from gistkit.benchmark.measure import MIB
from gistkit.runtime.attach import compressed_forward
from gistkit.runtime.live import LiveBytes

CLASSES = 1000
DETERMINISTIC_STEPS = 3
WARMUP_STEPS_ON_GPU, WARMUP_S = 20, 2.0
NOTHING_BYTES = 4096  # a loss and the allocator's rounding


@dataclass(frozen=True)
class Config:
    """What one row is about, but for the variant."""

    model: str
    device: str
    batch: int
    image: int
    steps: int
    autocast: bool
    seed: int

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


class Trainer:
    """One model under one variant, with its optimiser and its one batch."""

    def __init__(self, c: Config, variant: Variant) -> None:
        torch.manual_seed(c.seed)
        model = zoo.load(c.model, num_classes=CLASSES, image_size=c.image).to(c.device).train()
        self.c, self.variant = c, variant
        self.call = variant.prepare(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.inputs = torch.randn(c.batch, 3, c.image, c.image).to(c.device)
        self.targets = torch.randint(CLASSES, (c.batch,)).to(c.device)

    def forward(self) -> torch.Tensor:
        narrow = torch.autocast(torch.device(self.c.device).type, torch.bfloat16) if self.c.autocast else nullcontext()
        with self.variant.around(self.c.on_gpu), narrow:
            return F.cross_entropy(self.call(self.inputs), self.targets)

    def step(self, after_forward: Callable[[], None] = lambda: None) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        after_forward()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def warm_up(trainer: Trainer) -> None:
    """Two steps, and on a GPU as many as there are in 2 s, but no more than 20: a plan of gistkit's is made anew after
    steps 5, 10 and 20, and what is timed is the training that follows."""
    steps, begun = WARMUP_STEPS_ON_GPU if trainer.c.on_gpu else 0, time.perf_counter()
    for done in range(steps):
        if done >= 2 and time.perf_counter() - begun > WARMUP_S:
            break
        trainer.step()
        torch.cuda.synchronize()


def step_times(trainer: Trainer, steps: int) -> list[float]:
    """Seconds of each step, the device drained before and after."""
    drain = torch.cuda.synchronize if trainer.c.on_gpu else lambda: None
    seconds = []
    for _ in range(steps):
        drain()
        start = time.perf_counter()
        trainer.step()
        drain()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def memory(trainer: Trainer) -> dict[str, Any]:
    """Bytes of one step; see the module docstring."""
    trainer.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    kept: list[int] = []
    if not trainer.c.on_gpu:
        with LiveBytes(timeline=False) as live:
            trainer.step(lambda: kept.append(live.current_bytes))
        return {"kept_bytes": kept[0], "peak_bytes": live.peak_bytes}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    baseline = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.step(lambda: kept.append(torch.cuda.memory_allocated() - baseline))
    torch.cuda.synchronize()
    return {
        "kept_bytes": kept[0],
        "peak_bytes": torch.cuda.max_memory_allocated() - baseline,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "baseline_bytes": baseline,
    }


def notes(trainer: Trainer) -> dict[str, Any]:
    """What the report of a compressed model notes, if anything."""
    if not isinstance(trainer.call, torch.nn.Module) or compressed_forward(trainer.call) is None:
        return {}
    found = list(gistkit.report(trainer.call).notes)
    return {"notes": found} if found else {}


def measure(c: Config, variant: Variant) -> dict[str, Any]:
    """One row; with ``error`` where the variant cannot run."""
    row: dict[str, Any] = {
        "kind": "step",
        "time_utc": utc(),
        **environment(c.device),
        **{k: getattr(c, k) for k in ("model", "batch", "image", "steps", "seed")},
        "variant": variant.name,
        "dtype": "bfloat16 autocast" if c.autocast else "float32",
    }
    try:
        trainer = Trainer(c, variant)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            losses = [trainer.step().item() for _ in range(DETERMINISTIC_STEPS)]
        warm_up(trainer)
        measured = memory(trainer)
        times = step_times(trainer, c.steps)
        measured |= notes(trainer)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"}
    finally:
        trainer = None
        gc.collect()
        torch._dynamo.reset()
        if c.on_gpu:
            torch.cuda.empty_cache()
    middle, low, high = (times[round(q * (len(times) - 1))] for q in (0.5, 0.2, 0.8))
    return {**row, "median_s": middle, "p20_s": low, "p80_s": high, "losses": losses, **measured}


def with_plain(row: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    """The row with its comparison to the plain one of the same configuration."""
    if plain is None or "error" in row or "error" in plain:
        return row
    ratios = {f"{k}_ratio": _ratio(plain[f"{k}_bytes"], row[f"{k}_bytes"]) for k in ("kept", "peak")}
    slowdown = row["median_s"] / plain["median_s"]
    return {**row, **ratios, "slowdown": slowdown, "loss_equals_plain": row["losses"] == plain["losses"]}


def _ratio(plain_bytes: int, ours_bytes: int) -> float | None:
    """None where next to nothing is left on the device: all of it went elsewhere (save_on_cpu keeps only the loss)."""
    return None if ours_bytes < NOTHING_BYTES else plain_bytes / ours_bytes


def _shown_ratio(r: dict[str, Any], key: str) -> str:
    return "" if key not in r else "all" if r[key] is None else f"{r[key]:.2f}"


def table(results: list[dict[str, Any]]) -> Table:
    """The rows for people."""
    shown = Table(title="training step", header_style="bold")
    for name in (
        "model",
        "dtype",
        "variant",
        "kept MiB",
        "peak MiB",
        "step ms",
        "kept x",
        "peak x",
        "time x",
        "loss =",
    ):
        shown.add_column(name, justify="left" if name in ("model", "dtype", "variant") else "right")
    for r in results:
        head = (r["model"], r["dtype"], r["variant"])
        if "error" in r:
            shown.add_row(*head, "[red]failed[/red]")
            continue
        numbers = (f"{r['kept_bytes'] / MIB:.1f}", f"{r['peak_bytes'] / MIB:.1f}", f"{1e3 * r['median_s']:.1f}")
        ratios = [_shown_ratio(r, k) for k in ("kept_ratio", "peak_ratio", "slowdown")]
        shown.add_row(*head, *numbers, *ratios, "yes" if r.get("loss_equals_plain") else "no")
    return shown


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.steps", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--models", default="vgg16,resnet50")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtypes", default="fp32", help="fp32, amp (bfloat16 autocast), or both, comma-separated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-s", type=float, default=float("inf"), help="start no variant after this many seconds")
    args = parser.parse_args(argv)
    unknown = [v for v in args.variants.split(",") if v not in VARIANTS]
    if unknown:
        parser.error(f"--variants must be of {', '.join(VARIANTS)}; got {', '.join(unknown)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where a variant failed or a bitwise one changed the loss."""
    args = arguments(argv)
    results = []
    deadline = time.monotonic() + args.max_s
    late = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", encoding="utf-8") as file:
        for model in args.models.split(","):
            for dtype in args.dtypes.split(","):
                c = Config(model, args.device, args.batch, args.image, args.steps, dtype == "amp", args.seed)
                plain = None
                for name in args.variants.split(","):
                    if time.monotonic() > deadline:
                        late.append(f"{model} {dtype} {name}")
                        continue
                    row = measure(c, VARIANTS[name])
                    plain = row if name == "plain" else plain
                    results.append(with_plain(row, plain))
                    file.write(json.dumps(results[-1]) + "\n")
                    file.flush()
    Console(width=140).print(table(results))
    for r in results:
        if "error" in r:
            print(f"{r['model']} {r['dtype']} {r['variant']}: {r['error']}", file=sys.stderr)
    if late:
        print(f"bench.steps: {args.max_s:.0f} s are over; not run: {', '.join(late)}", file=sys.stderr)
    broken = [r for r in results if VARIANTS[r["variant"]].bitwise and r.get("loss_equals_plain") is False]
    for r in broken:
        print(f"{r['model']} {r['dtype']} {r['variant']}: the loss differs from plain PyTorch's", file=sys.stderr)
    return 1 if broken or any("error" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
