"""Plans carried out on the device: predicted peak and time beside measured ones, losses beside plain PyTorch's.

    python -m bench.plans --out bench/results/NAME.jsonl [--max-s 150]

Each case plans a network for its device and trains it through ``gistkit.step`` under the plan, and plainly from the
same parameters, deterministic algorithms on. ``losses`` are those of three steps that begin with an empty cache,
``step_s`` is the median of the steps behind them, with a warm one, and ``peak_bytes`` the most that the caching
allocator held in any step, the first included: everything on the device, as a budget counts it. ``autocast`` cases plan
and run under it; ``link: False`` plans as if there were no host to send anything to.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gistkit
from bench.rows import environment, utc
from gistkit import zoo
from gistkit.planning.cost.devices import PRESETS

CLASSES, STEPS, TIMED = 1000, 3, 7
CASES: tuple[dict[str, Any], ...] = (
    {"model": "vgg16", "budget": "97%"},
    {"model": "vgg16", "budget": "88%"},
    {"model": "resnet50", "budget": "80%"},
    {"model": "resnet50", "budget": "50%"},
    {"model": "resnet50", "budget": "80%", "link": False},
    {"model": "resnet50", "budget": "50%", "link": False},
    {"model": "resnet50", "budget": "40%"},
    {"model": "resnet50", "budget": "30%"},
    {"model": "resnet50", "budget": "30%", "lossy": "fp8s"},
    {"model": "googlenet", "budget": "60%"},
    {"model": "vgg16", "budget": "92%", "autocast": "bfloat16"},
    {"model": "resnet50", "budget": "70%", "autocast": "bfloat16"},
    {"model": "resnet50", "budget": "70%", "autocast": "bfloat16", "link": False},
    {"model": "resnet50", "budget": "40%", "autocast": "bfloat16"},
    {"model": "resnet50", "policy": "checkpoint"},
    {"model": "resnet50", "policy": "vdnn-all"},
    {"model": "resnet50", "policy": "cdma"},
)


def network(name: str, image: int) -> torch.nn.Module:
    """The same parameters at every call."""
    torch.manual_seed(0)
    return zoo.load(name, num_classes=CLASSES, image_size=image).cuda().train()


def autocast(dtype: str | None) -> torch.autocast:
    """The context of a case."""
    return torch.autocast("cuda", dtype=getattr(torch, dtype or "bfloat16"), enabled=dtype is not None)


def without_link() -> gistkit.Hardware:
    """An H200 from which nothing goes to the host."""
    return replace(PRESETS["h200"], d2h_gbps=0.0, h2d_gbps=0.0, both_gbps=0.0)


def trained(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, dtype: str | None) -> dict[str, Any]:
    """Losses, peaks and seconds of the steps; under autocast to ``dtype`` if it is given."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, peaks, seconds = [], [], []
    for number in range(STEPS + 1 + TIMED):
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if number < STEPS:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with autocast(dtype):
            loss = gistkit.step(model, F.cross_entropy, inputs, targets)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        peaks.append(torch.cuda.max_memory_allocated())
        optimizer.step()
    return {
        "losses": losses[:STEPS],
        "peak_bytes": max(peaks),
        "peaks_bytes": peaks[:STEPS],
        "step_s": statistics.median(seconds[-TIMED:]),
    }


def measure(case: dict[str, Any], batch: int, image: int) -> dict[str, Any]:
    """One row; with ``error`` where the case cannot be planned or run."""
    row = {"kind": "plan", "time_utc": utc(), **environment("cuda"), "batch": batch, "image": image, **case}
    options = {k: v for k, v in case.items() if k not in ("model", "autocast", "link")}
    if case.get("link") is False:
        options["hardware"] = without_link()
    dtype = case.get("autocast")
    try:
        torch.manual_seed(1)
        inputs = torch.randn(batch, 3, image, image).cuda()
        targets = torch.randint(CLASSES, (batch,)).cuda()
        row["plain"] = trained(network(case["model"], image), inputs, targets, dtype)
        gc.collect()
        model = network(case["model"], image)
        start = time.perf_counter()
        with autocast(dtype):
            plan = gistkit.plan(model, inputs, targets, loss_fn=F.cross_entropy, **options)
        row["planning_s"] = time.perf_counter() - start
        row |= {k: getattr(plan, k) for k in ("budget_bytes", "gap", "sub_batches", "hardware", "fidelity")}
        row["predicted"] = {"peak_bytes": plan.peak_bytes, "step_s": plan.step_s}
        row["forms"] = Counter(d.codec + (" on the host" if d.place == "host" else "") for d in plan.decisions)
        row["measured"] = trained(gistkit.compress(model, plan), inputs, targets, dtype)
        row["loss_equals_plain"] = row["measured"]["losses"] == row["plain"]["losses"]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    finally:
        inputs = targets = model = None
        gc.collect()
        torch.cuda.empty_cache()
    return row


def shown(row: dict[str, Any]) -> str:
    """The row in a line."""
    name = " ".join(str(row[k]) for k in ("model", "policy", "budget", "lossy", "autocast") if k in row)
    name += "" if row.get("link", True) else " (no link)"
    if "error" in row:
        return f"{name}: {row['error']}"
    measured, plain = (row[k]["peak_bytes"] / 2**20 for k in ("measured", "plain"))
    predicted = row["predicted"]["peak_bytes"] / 2**20
    limit = "" if row["budget_bytes"] is None else f", budget {row['budget_bytes'] / 2**20:,.0f}"
    ms = {k: 1e3 * row[k]["step_s"] for k in ("predicted", "measured", "plain")}
    return (
        f"{name}: peak {measured:,.0f} MiB, predicted {predicted:,.0f} ({predicted / measured:.3f}){limit}, "
        f"plain {plain:,.0f}; {ms['measured']:.1f} ms, plain {ms['plain']:.1f}, predicted "
        f"{ms['predicted']:.1f}; loss "
        f"{'equal' if row['loss_equals_plain'] else 'differs'}"
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where a case failed, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(prog="bench.plans", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--max-s", type=float, default=float("inf"), help="start no case after this many seconds")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.plans: needs a CUDA device; bench.optimal plans without one", file=sys.stderr)
        return 2
    torch.use_deterministic_algorithms(True, warn_only=True)
    deadline, failed = time.monotonic() + args.max_s, 0
    with open(args.out, "w", encoding="utf-8") as file:
        for case in CASES:
            if time.monotonic() > deadline:
                print(f"bench.plans: {args.max_s:.0f} s are over; not run: {case}", file=sys.stderr)
                continue
            row = measure(case, args.batch, args.image)
            failed += "error" in row
            print(shown(row), flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
