"""``gistkit bench``: how fast the encodings are on this device, against a copy and against PyTorch, and how small."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gistkit.benchmark import DTYPES, Job, codec_cases, jobs, rows
from gistkit.commands.ratios import add_ratios, run_ratios
from gistkit.commands.wrong import HERE, InputError, claim, progress_bars, write
from gistkit.profiling import checked_device
from gistkit.report import console, milliseconds, table
from gistkit.training import environment

SIZES_MIB = {"cpu": [4.0], "cuda": [64.0, 256.0, 512.0]}
DTYPE_NAMES = {"cpu": ["fp32"], "cuda": ["fp32", "bf16"]}
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
    add_ratios(parser)
    parser.add_argument("--quick", action="store_true", help="fewer calls a measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything for machines, making folders")


def run(options: argparse.Namespace) -> int:
    """Check, measure, write, show; 1 where a case failed its check or could not run."""
    device, todo = _prepare(options)
    if options.ratios is not None:
        return run_ratios(options, device)
    found = list(_with_progress(todo, device, options.quick))
    if options.json:  # the file first: whoever reads the table may close it early
        write(options.json, json.dumps({"environment": environment(device), "rows": found}) + "\n")
    console().print(bench_table(found, environment(device)))
    failed = [r for r in found if "error" in r]
    for r in failed:
        print(f"{r['case']} {r['direction']} {r['dtype']} {r['size_mib']:g} MiB: {r['error']}", file=sys.stderr)
    print(f"{len(found)} rows, {len(failed)} failed")
    return 1 if failed else 0


def _prepare(options: argparse.Namespace) -> tuple[str, list[Job]]:
    try:
        device = checked_device(options.device, "bench")
    except ValueError as error:
        raise InputError(error) from error
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


def _with_progress(todo: list[Job], device: str, quick: bool) -> Iterator[Row]:
    with progress_bars() as progress:
        task = progress.add_task("measuring", total=len(todo))
        for row in rows(todo, device, quick):
            progress.advance(task)
            yield row


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
