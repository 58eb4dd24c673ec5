"""Predicted and measured seconds of a step under every policy, on the device at hand.

    python -m bench.predictions --out bench/results/NAME.jsonl [--max-s 200] [--measure]

Four networks are planned under every policy, within a share of plain PyTorch's peak, or without a budget where the
policy has no plan within it, and ``gistkit.step`` runs the plan: forward, loss and backward. A row's ``ratio`` is
``plan.step_s`` over the median of the measured steps behind the warm-up. The rates are those of a
calibration that is made first (``rates`` names it, ``--rates NAME`` takes a preset or a file instead); with
``--measure`` the tasks' seconds are those of a measured plain step. Exit status 1 where a step failed, 2 without a CUDA
device.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import gistkit
from bench.networks import Transformer, densenet121
from gistkit import zoo
from gistkit.benchmark.measure import environment, utc
from gistkit.planning.cost.devices import Hardware, hardware
from gistkit.planning.policies.registry import POLICIES
from gistkit.profiling import calibrate

WARM_UP, TIMED = 3, 5
CLASSES, TOKENS = 1000, 8192
WITHIN = 0.15
Batch = tuple[torch.Tensor, torch.Tensor]


class Case(NamedTuple):
    """A network, its batch by number of rows, and the share of plain's peak that it is planned for."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    rows: int
    budget: str


def images(rows: int, side: int = 224) -> Batch:
    """Noise and labels."""
    return torch.randn(rows, 3, side, side), torch.randint(CLASSES, (rows,))


def tokens(rows: int, length: int = 256) -> Batch:
    """Tokens, and one to tell at every position."""
    return torch.randint(TOKENS, (rows, length)), torch.randint(TOKENS, (rows, length))


CASES = {
    "resnet50": Case(lambda: zoo.load("resnet50", num_classes=CLASSES, image_size=224), images, 128, "40%"),
    "vgg16": Case(lambda: zoo.load("vgg16", num_classes=CLASSES, image_size=224), images, 128, "60%"),
    "densenet121": Case(densenet121, images, 64, "50%"),
    "transformer": Case(Transformer, tokens, 32, "60%"),
}


def planned(model: nn.Module, batch: Batch, policy: str, budget: str | None, **options: Any) -> gistkit.Plan:
    """The policy's plan within the budget, without one where it has none within it; `plain` has none ever."""
    words = {"loss_fn": F.cross_entropy, "policy": policy, "fidelity": "reassociated", **options}
    try:
        return gistkit.plan(model, *batch, budget=None if policy == "plain" else budget, **words)
    except gistkit.BudgetError:
        return gistkit.plan(model, *batch, **words)


def step_seconds(model: nn.Module, batch: Batch, drain: Callable[[], None]) -> list[float]:
    """Seconds of each timed step, the device drained before and after, in order of size."""
    seconds = []
    for _ in range(WARM_UP + TIMED):
        model.zero_grad(set_to_none=True)
        drain()
        start = time.perf_counter()
        gistkit.step(model, F.cross_entropy, *batch)
        drain()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[WARM_UP:])


def measured_row(model: nn.Module, batch: Batch, plan: gistkit.Plan, device: str) -> dict[str, Any]:
    """What one plan predicts, and what its steps take."""
    drain = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = step_seconds(model if plan.policy == "plain" else gistkit.compress(model, plan), batch, drain)
    taken_s = statistics.median(seconds)
    predicted = plan.prediction
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "hardware": plan.hardware,
        "rates": predicted.rates,
        "measured_times": predicted.measured is not None,
        "sub_batches": plan.sub_batches,
        "taken_from": plan.details.get("taken_from", ""),
        "predicted_s": plan.step_s,
        "measured_s": taken_s,
        "fastest_s": seconds[0],
        "slowest_s": seconds[-1],
        "ratio": plan.step_s / taken_s,
    }


def rows(
    name: str, policies: list[str], device: str, rates: Hardware, measure: bool, over: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """A row a policy of one network; with ``error`` where it could not be planned or run."""
    case = CASES[name]
    torch.manual_seed(0)
    inputs, targets = case.batch(case.rows)
    batch = inputs.to(device), targets.to(device)
    times: Any = False
    if measure:
        times = gistkit.measure(case.model().to(device).train(), *batch, loss_fn=F.cross_entropy)
    for policy in policies:
        if over():
            print(f"bench.predictions: time is up before {name}, {policy}", file=sys.stderr)
            return
        row = {"kind": "prediction", "time_utc": utc(), **environment(device)}
        row |= {"model": name, "batch": case.rows, "budget": case.budget, "policy": policy}
        torch.manual_seed(0)
        model = case.model().to(device).train()
        try:
            start = time.perf_counter()
            plan = planned(model, batch, policy, case.budget, hardware=rates, measure=times)
            row["planning_s"] = time.perf_counter() - start
            row |= measured_row(model, batch, plan, device)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        model = plan = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        yield row


def shown(row: dict[str, Any]) -> str:
    """The row in a line."""
    name = f"{row['model']} {row['policy']}"
    if "error" in row:
        return f"{name}: {row['error'][:200]}"
    taken = f" (as {row['taken_from']})" if row["taken_from"] else ""
    limit = "no budget" if row["budget_bytes"] is None else row["budget"]
    verdict = "" if abs(row["ratio"] - 1) <= WITHIN else "  <-- not within 15 %"
    return (
        f"{name}{taken}, {limit}: predicted {1e3 * row['predicted_s']:.1f} ms, "
        f"measured {1e3 * row['measured_s']:.1f}: {row['ratio']:.2f}{verdict}"
    )


def ranking(found: list[dict[str, Any]]) -> list[str]:
    """By network, whether `optimal` was measured as the fastest of the policies within the budget."""
    lines = []
    for name in dict.fromkeys(r["model"] for r in found):
        own = [r for r in found if r["model"] == name and "error" not in r]
        best = next((r for r in own if r["policy"] == "optimal" and r["budget_bytes"] is not None), None)
        if best is None:
            continue
        within = [r for r in own if r["peak_bytes"] <= best["budget_bytes"]]
        fastest = min(within, key=lambda r: r["measured_s"])
        lines.append(f"{name}: optimal {1e3 * best['measured_s']:.1f} ms, fastest {fastest['policy']}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.predictions", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--rates", help="a preset or a file in place of a calibration")
    parser.add_argument("--measure", action="store_true", help="plan with measured seconds of a plain step")
    parser.add_argument("--max-s", type=float, default=200.0, help="start no case after this many seconds")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.predictions: needs a CUDA device; `gistkit plan` predicts without one", file=sys.stderr)
        return 2
    deadline, found = time.monotonic() + args.max_s, []
    rates = hardware(args.rates) if args.rates else calibrate("cuda")
    with open(args.out, "w", encoding="utf-8") as file:
        for name in args.models.split(","):
            for row in rows(
                name, args.policies.split(","), "cuda", rates, args.measure, lambda: time.monotonic() > deadline
            ):
                print(shown(row), flush=True)
                file.write(json.dumps(row) + "\n")
                file.flush()
                found.append(row)
    ratios = [r["ratio"] for r in found if "error" not in r]
    if ratios:
        near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
        print(f"{near} of {len(ratios)} within 15 %, from {min(ratios):.2f} to {max(ratios):.2f}")
    print("\n".join(ranking(found)))
    return int(any("error" in r for r in found))


if __name__ == "__main__":
    sys.exit(main())
