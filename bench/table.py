"""Tables in the README, made from rows and never by hand: python -m bench.table README.md ROWS.jsonl... [--check]

Each ``<!-- bench:step -->`` ... ``<!-- /bench:step -->`` (or ``layer``) in the file is filled with the table of the
rows of that kind. ``--check`` writes nothing and fails where the file would change.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from bench.rows import read
from gistkit.benchmark.measure import MIB

Row = dict[str, Any]


def markdown(header: list[str], lines: list[list[str]], left: int) -> str:
    """A Markdown table whose first ``left`` columns are text and the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


def step_table(rows: list[Row]) -> str:
    """Kept bytes and peak of a training step, each against plain PyTorch; times too where a GPU was timed."""
    timed = all(r.get("gpu") for r in rows)
    header = ["network", "dtype", "step", "kept, MiB", "peak, MiB", *(["time, ms"] if timed else []), "loss bit-equal"]
    lines = [_step_line(r, timed, len(header)) for r in rows]
    r = rows[0]
    return f"{markdown(header, lines, 3)}\n\n{conditions(rows)}, batch {r['batch']}, {r['image']}² images."


def _step_line(r: Row, timed: bool, width: int) -> list[str]:
    cells = [r["model"], r["dtype"], r["variant"]]
    if "error" in r:
        return [*cells, "failed", *[""] * (width - 4)]
    cells += [_against(r[f"{k}_bytes"] / MIB, r.get(f"{k}_ratio")) for k in ("kept", "peak")]
    return [*cells, *([_time(r)] if timed else []), {True: "yes", False: "no", None: ""}[r.get("loss_equals_plain")]]


def _against(value: float, ratio: float | None) -> str:
    return (
        f"{value:,.1f}" if ratio is None else f"{value:,.1f} ({ratio:.2f}x less)" if ratio > 1.005 else f"{value:,.1f}"
    )


def _time(r: Row) -> str:
    slowdown = r.get("slowdown")
    return f"{1e3 * r['median_s']:.1f}" + ("" if slowdown in (None, 1.0) else f" ({100 * (slowdown - 1):+.0f} %)")


def layer_table(rows: list[Row]) -> str:
    """GB/s and percent of the copy at the largest size of the run; dtypes side by side."""
    size = max(r["size_mib"] for r in rows)
    at_size = [r for r in rows if r["size_mib"] == size]
    dtypes = list(dict.fromkeys(r["dtype"] for r in at_size))
    cells: dict[tuple, dict[str, str]] = {}
    for r in at_size:
        text = "failed" if "error" in r else f"{r['gbps']:,.0f} ({r['percent_of_copy']:.0f} %)"
        cells.setdefault((r["case"], r["direction"], f"{r['density']:g}"), {})[r["dtype"]] = text
    lines = [[*case, *(found.get(d, "") for d in dtypes)] for case, found in cells.items()]
    header = ["case", "direction", "density", *(f"{d}, GB/s (of copy)" for d in dtypes)]
    return f"{markdown(header, lines, 2)}\n\n{conditions(rows)}, dense tensors of {size:g} MiB."


def conditions(rows: list[Row]) -> str:
    """Where and with what the rows were measured; every machine and version that occurs."""
    places = {r["gpu"] or f"CPU ({r['cpu']})" for r in rows}
    versions = {f"torch {r['torch']}, triton {r['triton']}" for r in rows}
    days, commits = {r["time_utc"][:10] for r in rows}, {r["commit"] for r in rows}
    return ", ".join(" / ".join(sorted(group)) for group in (places, versions, days)) + (
        f", commit {' / '.join(sorted(commits))}"
    )


TABLES = {"step": step_table, "layer": layer_table}


def filled(text: str, rows: list[Row]) -> str:
    """The text with every marked table made anew. Raises ValueError where no marker fits the rows or one has no end."""
    used = 0
    for kind, make in TABLES.items():
        of_kind = [r for r in rows if r["kind"] == kind]
        begin, end = f"<!-- bench:{kind} -->", f"<!-- /bench:{kind} -->"
        if text.count(begin) != text.count(end):
            raise ValueError(f"every {begin} needs its {end}, got {text.count(begin)} and {text.count(end)}")
        if of_kind and begin in text:
            body = f"{begin}\n{make(of_kind)}\n{end}"
            text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, b=body: b, text, flags=re.DOTALL)
            used += 1
    if not used:
        raise ValueError("no marker <!-- bench:step --> or <!-- bench:layer --> in the file fits the rows; add one")
    return text


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where --check finds the file out of date, 2 where it cannot be filled."""
    parser = argparse.ArgumentParser(prog="bench.table", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    before = args.file.read_text(encoding="utf-8")
    try:
        after = filled(before, [row for path in args.rows for row in read(path)])
    except ValueError as error:
        print(f"bench.table: {args.file}: {error}", file=sys.stderr)
        return 2
    if args.check:
        return int(after != before)
    args.file.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
