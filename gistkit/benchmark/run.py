"""The layer benchmark: every case at every size and dtype, one JSON line each.

    python -m gistkit.benchmark.run --device cuda --out bench/results/NAME.jsonl [--quick] [--sizes-mib 64,256,512]

Sizes are those of the dense tensor. A case is timed only after its check: outputs bit-equal to the oracle or to plain
PyTorch on a sample with NaN, infinities, -0.0 and subnormals in it. A case that fails has a row that says why and no
times, and the exit status is 1. On CUDA the times are the device's own; what launching takes the host is beside them
(``host_s``). Percentages are of a device copy of the same number of dense bytes in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gistkit.benchmark.cases import Case, Setting, codec_cases
from gistkit.benchmark.measure import MIB, copy_gbps, difference, environment, timed, utc
from gistkit.benchmark.operators import operator_cases
from gistkit.benchmark.rivals import rival_cases

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLE_BYTES = (1 << 18) + 12

Job = tuple[Case, torch.dtype, float, float]


def all_cases() -> list[Case]:
    """Every case, ours first."""
    return codec_cases() + operator_cases() + rival_cases()


def jobs(cases: list[Case], dtypes: list[torch.dtype], sizes_mib: list[float], on_gpu: bool) -> list[Job]:
    """(case, dtype, density, size) in the order they run: by size, so that a cut run has whole sizes."""
    return [
        (case, dtype, density, size)
        for size in sizes_mib
        for case in cases
        for dtype in (dtypes if case.dtypes is None else case.dtypes)
        for density in case.densities
        if on_gpu or not case.cuda_only
    ]


def check(case: Case, dtype: torch.dtype, density: float, device: str, seed: int) -> str:
    """'' where the case gives the right bits on the sample, else what is wrong."""
    try:
        workload = case.make(Setting(device, dtype, SAMPLE_BYTES, density, seed, sample=True))
        return difference(workload.run(), workload.expected())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def measure(job: Job, device: str, seed: int, copy: float, problem: str, quick: bool) -> dict[str, Any]:
    """One row: what was run, where, and either its times or what is wrong with it."""
    case, dtype, density, size_mib = job
    row: dict[str, Any] = {
        "kind": "layer",
        "time_utc": utc(),
        **environment(device),
        "case": case.name,
        "family": case.family,
        "direction": case.direction,
        "dtype": str(dtype).removeprefix("torch."),
        "size_mib": size_mib,
        "density": density,
        "seed": seed,
        "checked": not problem,
    }
    if problem:
        return {**row, "error": problem}
    try:
        workload = case.make(Setting(device, dtype, int(size_mib * MIB), density, seed))
        times = timed(workload.run, device, quick=quick)
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"}
    gbps = workload.moved_bytes / times.median_s / 1e9
    return {
        **row,
        "shape": list(workload.shape),
        "median_s": times.median_s,
        "p20_s": times.p20_s,
        "p80_s": times.p80_s,
        "host_s": times.host_s,
        "moved_bytes": workload.moved_bytes,
        "gbps": gbps,
        "copy_gbps": copy,
        "percent_of_copy": 100 * gbps / copy,
    }


def rows(todo: list[Job], device: str, seed: int, quick: bool, max_s: float) -> Iterator[dict[str, Any]]:
    """Measure the jobs one after the other; what is left when max_s seconds are over is not started."""
    copies: dict[float, float] = {}
    problems: dict[tuple, str] = {}
    deadline = time.monotonic() + max_s
    for job in track(todo, description="layer benchmark", console=Console(stderr=True)):
        if time.monotonic() > deadline:
            print(f"gistkit.benchmark.run: {max_s:.0f} s are over; the remaining cases were not run", file=sys.stderr)
            return
        case, dtype, density, size_mib = job
        if size_mib not in copies:
            copies[size_mib] = copy_gbps(int(size_mib * MIB), device, quick=quick)
        key = (case.name, case.direction, dtype, density)
        if key not in problems:
            problems[key] = check(case, dtype, density, device, seed)
        yield measure(job, device, seed, copies[size_mib], problems[key], quick)


def table(results: list[dict[str, Any]]) -> Table:
    """The rows for people: time, GB/s and share of the copy, or the error."""
    shown = Table(title="layer benchmark", header_style="bold")
    for name in ("case", "direction", "dtype", "MiB", "density", "median ms", "p20", "p80", "GB/s", "% of copy"):
        shown.add_column(name, justify="left" if name in ("case", "direction", "dtype") else "right")
    for r in results:
        head = (r["case"], r["direction"], r["dtype"], f"{r['size_mib']:g}", f"{r['density']:g}")
        if "error" in r:
            shown.add_row(*head, "[red]failed[/red]")
        else:
            ms = [f"{1e3 * r[k]:.3f}" for k in ("median_s", "p20_s", "p80_s")]
            shown.add_row(*head, *ms, f"{r['gbps']:.0f}", f"{r['percent_of_copy']:.0f}")
    return shown


def write(results: Iterator[dict[str, Any]], file: TextIO) -> list[dict[str, Any]]:
    """Write each row as soon as it is there, so that an interrupted run keeps what it has."""
    done = []
    for row in results:
        file.write(json.dumps(row) + "\n")
        file.flush()
        done.append(row)
    return done


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="gistkit.benchmark.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--sizes-mib", default=None, help="comma-separated; default 64,256,512 (on a CPU: 1)")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="shorter measurements; for a smoke test")
    parser.add_argument("--max-s", type=float, default=float("inf"), help="start no case after this many seconds")
    args = parser.parse_args(argv)
    unknown = [d for d in args.dtypes.split(",") if d not in DTYPES]
    if unknown:
        parser.error(f"--dtypes must be of {', '.join(DTYPES)}; got {', '.join(unknown)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = arguments(argv)
    on_gpu = torch.device(args.device).type == "cuda"
    sizes = [float(s) for s in (args.sizes_mib or ("64,256,512" if on_gpu else "1")).split(",")]
    cases = [c for c in all_cases() if args.only in c.name]
    todo = jobs(cases, [DTYPES[d] for d in args.dtypes.split(",")], sizes, on_gpu)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with open(args.out, "w", encoding="utf-8") as file:
        results = write(rows(todo, args.device, args.seed, args.quick, args.max_s), file)
    Console(width=140).print(table(results))
    failed = [r for r in results if "error" in r]
    for r in failed:
        print(f"{r['case']} {r['direction']} {r['dtype']} {r['size_mib']:g} MiB: {r['error']}")
    print(f"{len(results)} rows in {args.out}, {len(failed)} failed, {len(todo) - len(results)} not started")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
