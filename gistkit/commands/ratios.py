"""``gistkit bench --ratios``: how small cDMA's coders make the activations of networks in training, by layout."""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gistkit.benchmark import CODERS, LAYOUTS, ratio_rows, summed, watched
from gistkit.benchmark.ratios import Row
from gistkit.commands.wrong import InputError, write
from gistkit.errors import GistError
from gistkit.report import console, mib
from gistkit.runtime import does_not_fit
from gistkit.training import batches, environment, open_images
from gistkit.zoo import load

BATCH, IMAGE_SIZE, STEPS, WINDOWS = 16, 64, 20, 256


def add_ratios(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    text = "ratios in place of speeds: zvc, run-length and DEFLATE on the activations of these networks in training "
    text += f"({STEPS} steps, batch {BATCH}), by layout"
    parser.add_argument("--ratios", metavar="MODEL", nargs="+", help=text)
    text = "of --ratios: one folder a class, or 'digits'"
    parser.add_argument("--data", metavar="DIR", default="digits", help=text)
    text = "of --ratios: height and width the images are brought to"
    parser.add_argument("--image-size", type=int, metavar="N", default=IMAGE_SIZE, help=text)


def run_ratios(options: argparse.Namespace, device: str) -> int:
    """Train, measure, write, show; 0. The files are checked already."""
    most = WINDOWS // 8 if options.quick else WINDOWS
    with Console(stderr=True).status("training and compressing"):
        of = [_of_network(name, options, device, most) for name in options.ratios]
    if options.json:  # the file first: whoever reads the table may close it early
        found = {"environment": environment(device), "rows": [r for rows in of for r in rows]}
        write(options.json, json.dumps(found) + "\n")
    for rows in of:
        console().print(ratios_table(rows))
    return 0


def _of_network(name: str, options: argparse.Namespace, device: str, most: int) -> list[Row]:
    """Rows of the last of some training steps, and their sum. Raises InputError where there is nothing to measure."""
    size, steps, rows = options.image_size, 2 if options.quick else STEPS, []
    torch.manual_seed(0)
    try:
        images, _ = open_images(options.data, size)
        model = load(name, num_classes=len(images.classes), image_size=size).to(device).train()
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.003, momentum=0.9)
        *before, (last, _) = batches(images, BATCH, steps, seed=0)
        for x, labels in before:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(device)), labels.to(device)).backward()
            optimizer.step()
        with watched(model, lambda layer, output: rows.extend(ratio_rows(name, layer, output, most))):
            model(last.to(device))
    except Exception as error:  # a model of anybody's raises anything
        if isinstance(error, GistError) or does_not_fit(error):
            raise
        what = f"--ratios: {name} cannot be trained on {BATCH} images of {size}x{size}"
        raise InputError(f"{what} ({type(error).__name__}: {error})") from error
    if not rows:
        raise InputError(f"--ratios: {name} has no nn.ReLU or nn.MaxPool2d module with a 4-D output; name another")
    return rows + summed(rows)


def ratios_table(rows: list[Row]) -> Table:
    """The rows of one source, a line a layer: zero-value compression once, the others in every layout."""
    table = Table(title=f"{rows[0]['source']}, dense over compressed bytes, windows of 4 KiB", box=SIMPLE_HEAD)
    table.add_column("layer", overflow="fold")
    ordered = [(coder, layout) for coder in list(CODERS)[1:] for layout in LAYOUTS]
    for name in ("MiB", "density", "zvc", *(f"{coder}\n{layout}" for coder, layout in ordered)):
        table.add_column(name, justify="right", no_wrap=True)
    for i in range(0, len(rows), len(LAYOUTS)):
        of = {row["layout"]: row for row in rows[i : i + len(LAYOUTS)]}
        first = rows[i]
        cells = (mib(first["nbytes"]), f"{first['density']:.3f}", f"{first['zvc']:.2f}")
        table.add_row(first["layer"], *cells, *(f"{of[layout][coder]:.2f}" for coder, layout in ordered))
    return table
