"""Densities by layer over training, of the networks whose activations cDMA compresses (Rhu et al., HPCA 2018).

    python -m bench.densities --out bench/results/NAME.jsonl [--device cpu] [--epochs 20] [--every 40] [--lr 0.02]

Each network is trained on the digits in fp32, seed 0, batches of 64. A row is a kept tensor that holds zeros at a
measured step, with its density and the ratios of `zvc` and `csr` (``gistkit accuracy --density``). A network whose rows
``--out`` holds is not trained again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.rows import environment, read, utc
from gistkit.training import Accuracy, AccuracySettings

NETWORKS = {"alexnet": 64, "overfeat": 231, "nin": 64, "vgg16": 64, "squeezenet": 64, "googlenet": 64}
"""With their images' size: OverFeat's own, as other sizes are pooled by what is not deterministic on a GPU."""
Row = dict[str, Any]


def rows(name: str, options: argparse.Namespace) -> list[Row]:
    """The densities of one training."""
    about = {
        "model": name,
        "epochs": options.epochs,
        "lr": options.lr,
        "batch": 64,
        "image_size": options.image or NETWORKS[name],
    }
    settings = AccuracySettings(**about, schemes=("fp32",), seeds=1, density=options.every, device=options.device)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Accuracy(settings, Path(folder))
        (result,) = experiment.run()
        common = {"kind": "density", "time_utc": utc(), **environment(options.device), **about}
        common["accuracy"] = result.accuracies[0]
        epochs = read(Path(folder) / "rows.jsonl")
        return [{**common, **row} for epoch in epochs for row in epoch["densities"]]


def shown(found: list[Row]) -> str:
    """Of all layers together at the first and the last measured step, and of each at the last."""
    steps = sorted({row["step"] for row in found})
    first, last = ([row for row in found if row["step"] == step] for step in (steps[0], steps[-1]))
    layers = [row["density"] for row in last]
    return (
        f"{found[0]['model']}: accuracy {found[0]['accuracy']:.3f}, density {_together(first):.3f} at step {steps[0]}, "
        f"{_together(last):.3f} at step {steps[-1]}, by layer {min(layers):.3f} to {max(layers):.3f}"
    )


def _together(layers: list[Row]) -> float:
    return sum(row["density"] * row["elements"] for row in layers) / sum(row["elements"] for row in layers)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.densities")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file; networks that it holds are not run again")
    parser.add_argument("--models", default=",".join(NETWORKS), help="comma-separated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=40, help="steps from one measurement to the next")
    parser.add_argument("--lr", type=float, default=0.02, help="the highest; NiN and SqueezeNet learn with less")
    parser.add_argument("--image", type=int, default=0, help="size of the images, in place of each network's own")
    options = parser.parse_args(argv)
    held = {row["model"] for row in read(options.out, "density")} if options.out.exists() else set()
    for name in options.models.split(","):
        if name not in held:
            found = rows(name, options)
            print(shown(found), flush=True)
            with open(options.out, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
