"""``gistkit bench``: how fast the encodings are on this device, against a copy and against PyTorch, and how small."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gistkit.benchmark import CODERS, DTYPES, LAYOUTS, Job, codec_cases, jobs, ratio_rows, rows, summed, watched
from gistkit.commands.wrong import HERE, InputError, claim, input_errors, progress_bars, write
from gistkit.errors import GistError
from gistkit.profiling import checked_device
from gistkit.report import console, mib, milliseconds, table
from gistkit.runtime import does_not_fit
from gistkit.training import batches, environment, open_images
from gistkit.zoo import load

SIZES_MIB = {"cpu": [4.0], "cuda": [64.0, 256.0, 512.0]}
DTYPE_NAMES = {"cpu": ["fp32"], "cuda": ["fp32", "bf16"]}
BATCH, IMAGE_SIZE, STEPS, WINDOWS = 16, 64, 20, 256
"""Of the trainings whose activations are compressed."""
Row = dict[str, Any]


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench", help="measure the encodings on this device: bytes, GB/s, share of a copy's speed"
    )
    parser.add_argument("--device", metavar="DEVICE", default=HERE, help="cpu, cuda or cuda:N")
    codecs = list(dict.fromkeys(case.name for case in codec_cases()))
    text = "these codecs alone (mask1, zvc, csr+fp8, ...)"
    parser.add_argument("--codec", metavar="NAME", nargs="+", choices=codecs, help=text)
    text = "of the dense tensors (default: 64 256 512; on a CPU 4)"
    parser.add_argument("--sizes-mib", metavar="MIB", nargs="+", type=_size, help=text)
    text = f"of {', '.join(DTYPES)} (default: fp32 bf16; on a CPU fp32)"
    parser.add_argument("--dtypes", metavar="NAME", nargs="+", choices=DTYPES, help=text)
    text = "ratios in place of speeds: zvc, run-length and DEFLATE on the activations of these networks in training "
    text += f"({STEPS} steps, batch {BATCH}), by layout"
    parser.add_argument("--ratios", metavar="MODEL", nargs="+", help=text)
    text = "of --ratios: one folder a class, or 'digits'"
    parser.add_argument("--data", metavar="DIR", default="digits", help=text)
    text = "of --ratios: height and width the images are brought to"
    parser.add_argument("--image-size", type=int, metavar="N", default=IMAGE_SIZE, help=text)
    parser.add_argument("--quick", action="store_true", help="fewer calls a measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything for machines, making folders")


def run(options: argparse.Namespace) -> int:
    """Check, measure, write, show; 1 where a case failed its check or could not run."""
    device, todo = _prepare(options)
    if options.ratios is not None:
        return _run_ratios(options, device)
    with progress_bars() as progress:
        found = list(progress.track(rows(todo, device, options.quick), len(todo), description="measuring"))
    if options.json:  # the file first: whoever reads the table may close it early
        write(options.json, json.dumps({"environment": environment(device), "rows": found}) + "\n")
    console().print(bench_table(found, environment(device)))
    failed = [r for r in found if "error" in r]
    for r in failed:
        print(f"{r['case']} {r['direction']} {r['dtype']} {r['size_mib']:g} MiB: {r['error']}", file=sys.stderr)
    print(f"{len(found)} rows, {len(failed)} failed")
    return 1 if failed else 0


def _prepare(options: argparse.Namespace) -> tuple[str, list[Job]]:
    with input_errors(ValueError):
        device = checked_device(options.device, "bench")
    claim(options.json)
    cases = [c for c in codec_cases() if not options.codec or c.name in options.codec]
    dtypes = [DTYPES[name] for name in options.dtypes or DTYPE_NAMES[device.type]]
    sizes = options.sizes_mib or SIZES_MIB[device.type]
    return str(device), jobs(cases, dtypes, sizes, device.type == "cuda")


def _size(text: str) -> float:
    number = float(text)
    if not 0.01 <= number <= 2**20:
        raise argparse.ArgumentTypeError(f"must be from 0.01 to {2**20}, got {text!r}")
    return number


_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def bench_table(results: list[Row], about: Row) -> Table:
    """The rows as a table, with where they were measured."""
    where = f"{about['device']}, {about['threads']} threads, torch {about['torch']}"
    columns = ("codec", "direction", "dtype", ">MiB", ">bytes", ">error", ">ms", ">GB/s", ">of copy")
    shown = table(where, *columns, caption=_caption(results), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for r in results:
        name = f"{r['case']} {r['density']:g}" if r["by_density"] else r["case"]
        shown.add_row(name, r["direction"], _NAMES.get(r["dtype"], r["dtype"]), f"{r['size_mib']:g}", *_figures(r))
    return shown


def _caption(results: list[Row]) -> str:
    copies = sorted(r["copy_gbps"] for r in results if "copy_gbps" in r)
    error = "error: at most, of a value in the format's normal range, with integers of its block's span"
    parts = ["number behind a codec: density", "bytes: kept, of the dense tensor's", error]
    if copies:
        made = " to ".join(dict.fromkeys(f"{c:,.0f}" for c in (copies[0], copies[-1])))
        parts.append(f"GB/s: read and written; a copy makes {made}")
    return "; ".join(parts)


def _figures(row: Row) -> tuple[str | Text, ...]:
    if "error" in row:
        return ("", "", "", "", Text("failed", style="red"))
    kept = "" if row["kept_ratio"] is None else f"{row['kept_ratio']:.1%}"
    off = "none" if row["lossless"] else "sign" if row["relative_error"] is None else f"{row['relative_error']:.2%}"
    gbps, percent = (f"{row[k]:,.{0 if row[k] >= 100 else 1}f}" for k in ("gbps", "percent_of_copy"))
    return kept, off, milliseconds(row["median_s"]), gbps, f"{percent}%"


def _run_ratios(options: argparse.Namespace, device: str) -> int:
    most = WINDOWS // 8 if options.quick else WINDOWS
    with Console(stderr=True).status("training and compressing"):
        of = [_of_network(name, options, device, most) for name in options.ratios]
    if options.json:  # the file first: whoever reads the table may close it early
        found = {"environment": environment(device), "rows": [r for source in of for r in source]}
        write(options.json, json.dumps(found) + "\n")
    for source in of:
        console().print(ratios_table(source))
    return 0


def _of_network(name: str, options: argparse.Namespace, device: str, most: int) -> list[Row]:
    """Rows of the last of some training steps, and their sum. Raises InputError where there is nothing to measure."""
    size, steps, found = options.image_size, 2 if options.quick else STEPS, []
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
        with watched(model, lambda layer, output: found.extend(ratio_rows(name, layer, output, most))):
            model(last.to(device))
    except Exception as error:  # a model of anybody's raises anything
        if isinstance(error, GistError) or does_not_fit(error):
            raise
        what = f"--ratios: {name} cannot be trained on {BATCH} images of {size}x{size}"
        raise InputError(f"{what} ({type(error).__name__}: {error})") from error
    if not found:
        raise InputError(f"--ratios: {name} has no nn.ReLU or nn.MaxPool2d module with a 4-D output; name another")
    return found + summed(found)


def ratios_table(rows: list[Row]) -> Table:
    """The rows of one source, a line a layer: zero-value compression once, the others in every layout."""
    shown = Table(title=f"{rows[0]['source']}, dense over compressed bytes, windows of 4 KiB", box=SIMPLE_HEAD)
    shown.add_column("layer", overflow="fold")
    ordered = [(coder, layout) for coder in list(CODERS)[1:] for layout in LAYOUTS]
    for name in ("MiB", "density", "zvc", *(f"{coder}\n{layout}" for coder, layout in ordered)):
        shown.add_column(name, justify="right", no_wrap=True)
    for i in range(0, len(rows), len(LAYOUTS)):
        of = {row["layout"]: row for row in rows[i : i + len(LAYOUTS)]}
        first = rows[i]
        cells = (mib(first["nbytes"]), f"{first['density']:.3f}", f"{first['zvc']:.2f}")
        shown.add_row(first["layer"], *cells, *(f"{of[layout][coder]:.2f}" for coder, layout in ordered))
    return shown
