"""Tables in the README and the docs, made from rows and never by hand.

    python -m bench.table README.md ROWS.jsonl... [--check]

Each ``<!-- bench:training -->`` ... ``<!-- /bench:training -->`` in the file is filled with the table of the rows of
steps that do not wait and of CUDA graphs,
``bench:compiled`` with that of compiled steps, a line a network, ``bench:compiled-rows`` with a line a step: of each
the last commit whose rows have plain ``torch.compile`` too;
``bench:prediction`` with those of steps under budgets, a network each, the newest row of each.
``--check`` writes nothing and fails where the file would change.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from bench.budget_table import network_tables, newest, verdict
from bench.rows import read

Row = dict[str, Any]


def _more(ours: float, theirs: float) -> str:
    """By how many percent the first is more, never -0."""
    return f"{round(100 * (ours / theirs - 1)) or 0:+d} %"


def markdown(header: list[str], lines: list[list[str]], left: int) -> str:
    """A Markdown table whose first ``left`` columns are text and the others numbers."""
    rule = ["---"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *lines])


PLAIN = "compile deterministic"
COMPILED = {
    "gistkit deterministic": "bitwise", "gistkit reassociated": "reassociated", "gistkit fp8s": "fp8s"
}  # fmt: skip
"""Variants of compiled steps in the table, and their names there."""
SHARED = {"compile": PLAIN, "gistkit": "gistkit deterministic"}
"""What stands for these where all variants shared their caches."""


def compiled_table(rows: list[Row]) -> str:
    """A line a network: plain ``torch.compile``, and of each class how many times less is kept, how many times lower
    the peak is, and what the kernels take more."""
    header = ["network", "dtype", "`torch.compile`: kept, peak, kernels", *(f"`{name}`" for name in COMPILED.values())]
    lines = []
    for (model, conf), found in _compiled_runs(rows).items():
        plain = found[-1][PLAIN]
        cells = [
            model,
            conf,
            f"{plain['kept_mib']:,.0f} MiB, {plain['peak_mib']:,.0f} MiB, {plain['device_ms']:.1f} ms",
        ]
        for variant in COMPILED:
            run = next((run for run in reversed(found) if variant in run), None)
            cells.append(_compiled_cell(run[variant], run[PLAIN]) if run else "")
        lines.append(cells)
    return f"{markdown(header, lines, 2)}\n\n{conditions(rows)}, batch 128 (fp32: 64), 224² images."


def _compiled_cell(row: Row, plain: Row) -> str:
    kept, peak = (f"{plain[k] / row[k]:.2f}x" for k in ("kept_mib", "peak_mib"))
    return f"{kept}, {peak}, {_more(row['device_ms'], plain['device_ms'])}"


def compiled_rows_table(rows: list[Row]) -> str:
    """Kept bytes, peak and the kernels' time of a compiled step, each against plain ``torch.compile`` in one run."""
    header = ["network", "dtype", "step", "kept, MiB", "peak, MiB", "kernels, ms", "gradients bit-equal"]
    lines = []
    for found in _compiled_runs(rows).values():
        for variant, name in COMPILED.items():
            run = next((run for run in reversed(found) if variant in run), None)
            lines += [_compiled_line(run[variant], run[PLAIN], name)] if run else []
    return f"{markdown(header, lines, 3)}\n\n{conditions(rows)}, batch 128 (fp32: 64), 224² images."


def _compiled_runs(rows: list[Row]) -> dict[tuple[str, str], list[dict[str, Row]]]:
    """By network and dtype, the runs that have plain ``torch.compile`` too, in the order of their commits' rows."""
    rows = [r for r in rows if "device_ms" in r and not r["mode"]]
    if not any(r["variant"] == PLAIN for r in rows):  # caches were shared: no variant's kernels were chosen anew
        rows = [{**r, "variant": SHARED.get(r["variant"], r["variant"])} for r in rows]
    runs: dict[tuple[str, str], list[dict[str, Row]]] = {}
    for case in dict.fromkeys((r["model"], r["conf"]) for r in rows):
        own = [r for r in rows if (r["model"], r["conf"]) == case]
        found = [{r["variant"]: r for r in own if r["commit"] == c} for c in dict.fromkeys(r["commit"] for r in own)]
        runs[case] = [run for run in found if PLAIN in run]
    return runs


def _compiled_line(row: Row, plain: Row, name: str) -> list[str]:
    cells = [row["model"], row["conf"], name]
    cells += [f"{plain[k]:,.0f} → {row[k]:,.0f} ({plain[k] / row[k]:.2f}x less)" for k in ("kept_mib", "peak_mib")]
    ours, theirs = row["device_ms"], plain["device_ms"]
    cells.append(f"{theirs:.1f} → {ours:.1f} ({_more(ours, theirs)})")
    if "equal" not in row:
        return [*cells, "no"]
    itself = "" if row["repeats"] == row["of"] else f"; repeats {row['repeats']} itself"
    return [*cells, f"{row['equal']} of {row['of']}{itself}"]


def training_table(rows: list[Row]) -> str:
    """Steps that do not wait for each other, plain and compressed, and where there are rows of them the same steps as
    CUDA graphs, in another run, where nothing is kept sparse."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda r: r["time_utc"]):
        how = "graph" if "graph_ms" in row else "step"
        found.setdefault((row["model"], row["conf"]), {})[f"{how} {row['variant']}"] = row
    header = ["network", "dtype", "kept, MiB", "peak, MiB", "step, ms"]
    header += ["as a CUDA graph, ms"] * any("graph gistkit" in own for own in found.values())
    lines = []
    for (model, conf), own in found.items():
        plain, ours = own["step plain"], own["step gistkit"]
        cells = [f"{plain[k]:,.0f} → {ours[k]:,.0f}" for k in ("kept_mib", "peak_mib")]
        pairs = [(plain["step_ms"], ours["step_ms"])]
        pairs += [tuple(own[f"graph {v}"]["graph_ms"] for v in ("plain", "gistkit"))] if "graph gistkit" in own else []
        lines.append([model, conf, *cells, *(f"{a:.1f} → {b:.1f} ({b / a:.2f}x)" for a, b in pairs)])
    return f"{markdown(header, lines, 2)}\n\n{conditions(rows)}, batch 128 (fp32: 64), 224² images."


def budget_tables(rows: list[Row]) -> str:
    """Steps of every policy within budgets, measured and predicted."""
    rows = newest(rows)
    tables = [markdown(header, lines, 1) for header, lines in network_tables(rows)]
    keys = (
        "Measured (predicted); bold: the fastest whose measured peak is within the budget; †: no plan within it, run "
        "without a budget."
    )
    return "\n\n".join([*tables, f"{keys} {verdict(rows)}", f"{conditions(rows)}."])


def conditions(rows: list[Row]) -> str:
    """Where and with what the rows were measured; every machine and version that occurs, up to three commits."""
    places = {r["gpu"] or f"CPU ({r['cpu']})" for r in rows}
    versions = {f"torch {r['torch']}, triton {r['triton']}" for r in rows}
    days, commits = {r["time_utc"][:10] for r in rows}, {r["commit"] for r in rows}
    told = f"commit {' / '.join(sorted(commits))}" if len(commits) < 4 else "commits in the rows (bench/results)"
    return ", ".join([" / ".join(sorted(group)) for group in (places, versions, days)] + [told])


TABLES = {
    "training": ("training", training_table), "prediction": ("prediction", budget_tables),
    "compiled": ("compiled", compiled_table), "compiled-rows": ("compiled", compiled_rows_table),
}  # fmt: skip
"""By marker, the kind of rows and the table of them."""


def filled(text: str, rows: list[Row]) -> str:
    """The text with every marked table made anew that there are rows for. Raises ValueError where a kind of rows has no
    marker, or one has no end."""
    kinds = {marker: kind for marker, (kind, _) in TABLES.items() if f"<!-- bench:{marker} -->" in text}
    for kind in sorted({r["kind"] for r in rows} & {kind for kind, _ in TABLES.values()} - set(kinds.values())):
        raise ValueError(f"the file needs <!-- bench:{kind} --> and its <!-- /bench:{kind} -->, got none; add both")
    for marker, (kind, table) in TABLES.items():
        own = [r for r in rows if r["kind"] == kind]
        begin, end = f"<!-- bench:{marker} -->", f"<!-- /bench:{marker} -->"
        if text.count(begin) != text.count(end):
            found = f"{text.count(begin)}, {text.count(end)}"
            raise ValueError(f"the file needs {begin} and its {end}, got {found}; add both")
        if own and begin in text:
            body = f"{begin}\n{table(own)}\n{end}"
            text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, body=body: body, text, flags=re.DOTALL)
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
