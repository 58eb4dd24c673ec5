"""``gistkit bench``: how fast the encodings are on this device, against a copy and against PyTorch, and how small."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gistkit.benchmark import DTYPES, Case, Job, codec_cases, environment, jobs, rows
from gistkit.commands.wrong import HelpFormatter, InputError, claim, progress_bars, write
from gistkit.profiling import checked_device
from gistkit.report import console, milliseconds

SIZES_MIB = {"cpu": "4", "cuda": "64,256,512"}
DTYPE_NAMES = {"cpu": "fp32", "cuda": "fp32,bf16"}
LEAST_MIB, MOST_MIB = 0.01, 2**20
NAME_WIDTH = 18
"""Columns that the longer names are folded to where the table is wider than the screen."""
Row = dict[str, Any]


def add(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "bench",
        help="measure the encodings on this device: bytes, GB/s, share of a copy's speed",
        formatter_class=HelpFormatter,
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", metavar="DEVICE", default=here, help="cpu, cuda or cuda:N")
    parser.add_argument("--codec", metavar="NAME", nargs="+", help="these codecs alone (mask1, zvc, csr+fp8, ...)")
    text = f"of the dense tensors (default: {SIZES_MIB['cuda']}; on a CPU {SIZES_MIB['cpu']})"
    parser.add_argument("--sizes-mib", metavar="LIST", help=text)
    text = f"of {', '.join(DTYPES)} (default: {DTYPE_NAMES['cuda']}; on a CPU {DTYPE_NAMES['cpu']})"
    parser.add_argument("--dtypes", metavar="LIST", help=text)
    text = "shares of elements that are not zero, for sparse encodings (default: 0.5, and 0.1 for zvc and csr)"
    parser.add_argument("--density", metavar="LIST", help=text)
    parser.add_argument("--quick", action="store_true", help="fewer calls a measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything for machines, making folders")


def run(options: argparse.Namespace) -> int:
    """Check, measure, write, show; 1 where a case failed its check or could not run."""
    device, todo = _prepare(options)
    found = list(_with_progress(todo, device, options.quick))
    if options.json:  # the file first: whoever reads the table may close it early
        write(options.json, json.dumps({"environment": environment(device), "rows": found}) + "\n")
    console().print(bench_table(found))
    failed = [r for r in found if "error" in r]
    for r in failed:
        print(f"{r['case']} {r['direction']} {r['dtype']} {r['size_mib']:g} MiB: {r['error']}", file=sys.stderr)
    print(f"{len(found)} rows, {len(failed)} failed")
    return 1 if failed else 0


def _prepare(options: argparse.Namespace) -> tuple[str, list[Job]]:
    """Check everything that can be wrong before the first measurement."""
    try:
        device = checked_device(options.device, "bench")
        sizes = _numbers("sizes-mib", options.sizes_mib or SIZES_MIB[device.type], LEAST_MIB, MOST_MIB)
        densities = options.density and _numbers("density", options.density, 0.001, 0.999)
        dtypes = _dtypes(options.dtypes or DTYPE_NAMES[device.type])
        todo = jobs(_cases(options.codec), dtypes, sizes, device.type == "cuda", densities)
    except ValueError as error:
        raise InputError(error) from error
    claim(options.json)
    return str(device), todo


def _numbers(name: str, text: str, least: float, most: float) -> list[float]:
    """The numbers of a comma-separated list, each once. Raises ValueError for any outside of least to most."""
    found = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            got = f"{part.strip()!r} in {text!r}"
            raise ValueError(f"{name} must be from {least} to {most} with commas between, got {got}")
        found.append(number)
    return list(dict.fromkeys(found))


def _dtypes(text: str) -> list[torch.dtype]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"dtypes must be of {', '.join(DTYPES)} with commas between, got {name!r}")
    return [DTYPES[name] for name in names]


def _cases(names: list[str] | None) -> list[Case]:
    """The cases of these codecs, or of all. Raises ValueError for a codec that has none."""
    cases = codec_cases()
    known = list(dict.fromkeys(c.name for c in cases))
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"codec must be of {', '.join(known)}; got {name!r}{hint}")
    return [c for c in cases if not names or c.name in names]


def _with_progress(todo: list[Job], device: str, quick: bool) -> Iterator[Row]:
    with progress_bars() as progress:
        task = progress.add_task("measuring", total=len(todo))
        for row in rows(todo, device, quick):
            progress.advance(task)
            yield row


def bench_table(results: list[Row]) -> Table:
    """The rows as a table; what is the same in all of them stands in its title."""
    first = results[0]
    said, columns = [first["gpu"] or f"CPU, {first['cpu']}", f"torch {first['torch']}"], []
    for name, text, alone in (("dtype", _dtype, "{}"), ("MiB", _size, "{} MiB"), ("density", _density, "density {}")):
        values = {text(r) for r in results}
        if len(values) > 1:
            columns.append((name, text))
        elif values != {""}:
            said.append(alone.format(values.pop()))
    table = Table(title=", ".join(said), caption=_caption(results), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("codec", min_width=min(NAME_WIDTH, max(len(r["case"]) for r in results)), overflow="fold")
    table.add_column("direction", no_wrap=True)
    for name in (*(name for name, _ in columns), "bytes", "error", "ms", "GB/s", "of copy"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        table.add_row(r["case"], r["direction"], *(text(r) for _, text in columns), *_figures(r))
    return table


def _caption(results: list[Row]) -> str:
    copies = sorted(r["copy_gbps"] for r in results if "copy_gbps" in r)
    parts = ["bytes: kept, of the dense tensor's", "error: at most, of a value in the format's normal range"]
    if copies:
        made = " to ".join(dict.fromkeys(f"{c:,.0f}" for c in (copies[0], copies[-1])))
        parts.append(f"GB/s: read and written; a copy makes {made}")
    return "; ".join(parts)


def _figures(row: Row) -> tuple[str | Text, ...]:
    if "error" in row:
        return ("", "", "", "", Text("failed", style="red"))
    kept = "" if row["kept_ratio"] is None else f"{row['kept_ratio']:.1%}"
    gbps, percent = (f"{row[k]:,.{0 if row[k] >= 100 else 1}f}" for k in ("gbps", "percent_of_copy"))
    return kept, _error(row), milliseconds(row["median_s"]), gbps, f"{percent}%"


def _error(row: Row) -> str:
    """How far a value in the format's normal range may move."""
    if row["lossless"]:
        return "none"
    return "sign" if row["relative_error"] is None else f"{row['relative_error']:.2%}"


def _dtype(row: Row) -> str:
    return next((name for name, dtype in DTYPES.items() if str(dtype) == f"torch.{row['dtype']}"), row["dtype"])


def _size(row: Row) -> str:
    return f"{row['size_mib']:g}"


def _density(row: Row) -> str:
    return f"{row['density']:g}" if row["by_density"] else ""
