"""The planner's table of codec costs, from rows of the layer benchmark: python -m bench.codec_costs ROWS.jsonl...

Prints ``MEASURED`` and ``EMPTY`` of :mod:`gistkit.planning.cost.codec_costs` as source, and how far the planner's
seconds are
from every row's, by the table as it is checked in. The rows are of one device at two sizes or more: a figure is the
time that a further byte takes, the slope of a line through the sizes, over the same of a copy; what a call takes
however small its tensor is, is ``Hardware.launch_s``.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

from bench.rows import read
from gistkit.benchmark.measure import MIB
from gistkit.ir import FORMS
from gistkit.planning.cost.codec_costs import MEASURED_DENSITY, Passes
from gistkit.planning.cost.devices import PRESETS
from gistkit.planning.cost.table import CostTable

Row = dict[str, Any]
Table = dict[str, tuple[Passes, ...]]

DTYPES = ("float32", "bfloat16")
DIRECTIONS = Passes._fields
SPARSE_DENSITY = 0.1
"""The other density of the rows, of the families alone."""


def figures(rows: Sequence[Row]) -> dict[tuple[str, str, str, float], float]:
    """Passes by (codec, direction, dtype, density). Raises ValueError for rows of one size, or of several devices."""
    sized = _of_codecs(rows)
    if len({r["size_mib"] for r in sized}) < 2:
        raise ValueError("rows must be of at least two sizes, as what a byte takes is a slope; give more files")
    if len({(r["gpu"], r["torch"], r["triton"]) for r in sized}) > 1:
        raise ValueError("rows must be of one device and version of torch and triton; give one run's files")
    copies: dict[float, float] = {}
    times: dict[tuple[str, str, str, float], dict[float, float]] = defaultdict(dict)
    for row in sized:
        nbytes = row["size_mib"] * MIB
        copies[nbytes] = 2 * nbytes / (row["copy_gbps"] * 1e9)
        times[row["case"], row["direction"], row["dtype"], row["density"]][nbytes] = row["median_s"]
    pass_s = _slope(copies) / 2
    return {key: _slope(by_size) / pass_s for key, by_size in times.items()}


def _of_codecs(rows: Sequence[Row]) -> list[Row]:
    """The rows of encodings that there are still."""
    return [
        r for r in rows if r["kind"] == "layer" and r["family"] == "codec" and "error" not in r and r["case"] in FORMS
    ]


def _slope(seconds: dict[float, float]) -> float:
    return linear_regression(list(seconds), list(seconds.values())).slope


def tables(rows: Sequence[Row]) -> tuple[Table, Table]:
    """(``MEASURED``, ``EMPTY``), rounded to two digits. Raises ValueError as :func:`figures`."""
    found = figures(rows)
    half = {key[:3]: value for key, value in found.items() if key[3] == MEASURED_DENSITY}
    share = SPARSE_DENSITY / MEASURED_DENSITY
    # the line through both densities, where nothing is stored
    empty = {
        key[:3]: (value - share * half[key[:3]]) / (1 - share)
        for key, value in found.items()
        if key[3] == SPARSE_DENSITY and key[:3] in half
    }
    return _by_codec(half), _by_codec(empty)


def _by_codec(found: dict[tuple[str, str, str], float]) -> Table:
    names = dict.fromkeys(name for name, _, dtype in found if dtype in DTYPES)
    return {
        name: tuple(Passes(*(round(found.get((name, d, dtype), 0.0), 2) for d in DIRECTIONS)) for dtype in DTYPES)
        for name in names
    }


def source(name: str, table: Table) -> str:
    """A table as Python, a codec a line."""
    lines = [f'    "{codec}": ({", ".join(map(_cell, cells))}),' for codec, cells in table.items()]
    return "\n".join([f"{name}: dict[str, tuple[Passes, Passes]] = {{", *lines, "}"])


def _cell(cell: Passes) -> str:
    values = [getattr(cell, d) for d in DIRECTIONS]
    return f"P({', '.join(f'{v:.2f}' for v in (values if values[-1] else values[:-1]))})"


def predictions(rows: Sequence[Row], costs: CostTable) -> list[tuple[float, Row]]:
    """(seconds by the planner's table, row) of every row that it speaks of: encodings with their packing, decodings,
    ReLU's backwards with what the planner charges for PyTorch's own."""
    packs = {_case(r): r["median_s"] for r in rows if r["direction"] == "pack" and "error" not in r}
    found = []
    for row in _of_codecs(rows):
        if row["dtype"] in DTYPES:
            seconds = _predicted(row, costs)
            if seconds is not None:
                both_s = row["median_s"] + (packs.get(_case(row), 0.0) if row["direction"] == "encode" else 0.0)
                found.append((seconds, {**row, "median_s": both_s}))
    return found


def _case(row: Row) -> tuple:
    return (row["case"], row["dtype"], row["density"], row["size_mib"])


def _predicted(row: Row, costs: CostTable) -> float | None:
    measures = (row["case"], int(row["size_mib"] * MIB), row["dtype"], row["density"])
    mask = row["case"] == "mask1"  # whose encode runs inside a ReLU, and which is not decoded
    if row["direction"] == "relu_backward":
        return costs.copy_s(3 * measures[1]) - costs.copy_s(0) + costs.relu_backward_s(*measures)
    if mask or row["direction"] not in ("encode", "decode"):
        return None
    return costs.encode_s(*measures) if row["direction"] == "encode" else costs.decode_s(*measures)


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 2 for rows that make no table."""
    parser = argparse.ArgumentParser(prog="bench.codec_costs", description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--hardware", choices=list(PRESETS), default="h200", help="whose costs rows are held against")
    args = parser.parse_args(argv)
    try:
        rows = [row for path in args.rows for row in read(path, "layer")]
        measured, empty = tables(rows)
    except ValueError as error:
        print(f"bench.codec_costs: {error}", file=sys.stderr)
        return 2
    print(source("MEASURED", measured), source("EMPTY", empty), sep="\n\n")
    costs = CostTable(PRESETS[args.hardware], (), {})
    told = predictions(rows, costs)
    print(f"\nThe planner's seconds over the measured ones, {len(told)} rows:")
    for size in sorted({row["size_mib"] for _, row in told}):
        found = sorted(
            (seconds / row["median_s"], f"{row['case']} {row['direction']} {row['dtype']}")
            for seconds, row in told
            if row["size_mib"] == size
        )
        ends = " to ".join(f"{ratio:.2f} ({case})" for ratio, case in (found[0], found[-1]))
        print(f"{size:g} MiB: median {found[len(found) // 2][0]:.2f}, {ends}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
