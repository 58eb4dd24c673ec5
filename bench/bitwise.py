"""Twenty optimiser steps of every network of the zoo, plain and compressed, compared bit for bit.

    python -m bench.bitwise --out bench/results/NAME.jsonl [--device cuda] [--models vgg16,resnet50] [--max-s 300]

SGD with momentum over other random images at each step, small ones where the network has a form for them, deterministic
algorithms on. A row says whether the loss of every step and, after the last, every gradient, parameter and buffer have
the same bits under ``gistkit.compress(model)``, and if not, what differs first; where plain PyTorch itself does not
repeat its bits (``repeats``: it has no deterministic form of some operator), that is no difference of gistkit's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gistkit
from bench.rows import environment, utc
from gistkit import zoo
from gistkit.benchmark.measure import bit_equal

CLASSES, BATCH = 10, 4
IMAGE, IMAGES = 32, {"overfeat": 96, "fcn": 64}
"""Pixels each way; these two have no small form."""


def batches(steps: int, image: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random images and classes, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        inputs = torch.randn(BATCH, 3, image, image, generator=generator)
        targets = torch.randint(CLASSES, (BATCH,), generator=generator)
        found.append((inputs.to(device), targets.to(device)))
    return found


def _loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy; of a network that gives a map of classes, at every pixel."""
    return F.cross_entropy(out, targets.view(-1, 1, 1).expand(-1, *out.shape[2:]) if out.dim() == 4 else targets)


def trained(model: torch.nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Every loss, and the gradients, parameters and buffers after the last step, by name."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    found = {}
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad(set_to_none=True)
        loss = _loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found[f"loss of step {step + 1}"] = loss.detach()
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found | dict(model.state_dict())


def _first_difference(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """The name of the first tensor that has other bits, "" where none has."""
    return next((k for k, t in expected.items() if k not in found or not bit_equal(t, found[k])), "")


def compare(name: str, steps: int, device: str) -> dict[str, Any]:
    """One row."""
    image = IMAGES.get(name, IMAGE)
    torch.manual_seed(0)
    plain = zoo.load(name, num_classes=CLASSES, image_size=image).to(device).train()
    twin = gistkit.compress(copy.deepcopy(plain))
    data, start = batches(steps, image, device), time.perf_counter()
    ours = trained(twin, data)
    again = trained(copy.deepcopy(plain), data)
    expected = trained(plain, data)
    found: Any = gistkit.report(twin)
    stats = found.stats
    differs = _first_difference(expected, ours)
    return {
        "kind": "bitwise",
        "time_utc": utc(),
        **environment(device),
        "model": name,
        "parameters": sum(p.numel() for p in plain.parameters()),
        "batch": BATCH,
        "image": image,
        "steps": steps,
        "last_loss": float(expected[f"loss of step {steps}"]),
        "plain_bytes": stats.plain_bytes,
        "kept_bytes": stats.kept_bytes,
        "repeats": not _first_difference(expected, again),
        "equal": not differs and ours.keys() == expected.keys(),
        "differs": differs,
        "seconds": time.perf_counter() - start,
    }


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit status is 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default=",".join(zoo.MODELS), help="comma-separated names of the zoo; default: all")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max-s", type=float, default=float("inf"), help="start no network after so many seconds")
    args = parser.parse_args(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    wrong, deadline = 0, time.monotonic() + args.max_s
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", encoding="utf-8") as file:
        for name in args.models.split(","):
            if time.monotonic() > deadline:
                print(f"bench.bitwise: {args.max_s:.0f} s are over; {name} and what follows was not run")
                break
            row = compare(name, args.steps, args.device)
            wrong += row["repeats"] and not row["equal"]
            file.write(json.dumps(row) + "\n")
            file.flush()
            unequal = "DIFFERS" if row["repeats"] else "plain PyTorch does not repeat its bits"
            verdict = "equal" if row["equal"] else f"{unequal}: {row['differs']}"
            print(f"{name}: {verdict}, {row['seconds']:.1f} s", flush=True)
            torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
