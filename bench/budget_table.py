"""Steps under budgets, every policy beside plain PyTorch and its own ways: tables of ``bench.predictions``' rows."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
GIB = 2**30
WITHIN = 0.15
BEST = ("optimal", "graph:optimal")


def newest(rows: list[Row]) -> list[Row]:
    """Of the rows of one step under one policy and budget the last measured; networks without a budget are left out."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda r: r["time_utc"]):
        found[(*(row[k] for k in ("model", "batch", "dtype", "channels_last", "policy", "budget")),)] = row
    named = {r["model"] for r in rows if r["budget"]}
    return [r for r in found.values() if r["model"] in named]


def network_tables(rows: list[Row]) -> list[tuple[list[str], list[list[str]]]]:
    """Header and lines of a table a network: a column a precision and budget, a line a policy."""
    return [_table([r for r in rows if r["model"] == model]) for model in dict.fromkeys(r["model"] for r in rows)]


def _table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    columns, first = _columns(rows), rows[0]
    header = [f"{first['model']} ({first['batch']})", *(f"{s}, {b}" for s, b, _ in columns)]
    lines = []
    for policy in dict.fromkeys(r["policy"] for r in rows):
        cells = [_cell(found.get(policy), _fastest(found)) for *_, found in columns]
        name = policy.replace("torch:", "PyTorch's ")
        lines.append([f"{name.removeprefix('graph:')}, CUDA graph" if name.startswith("graph:") else name, *cells])
    return header, lines


def _columns(rows: list[Row]) -> list[tuple[str, str, dict[str, Row]]]:
    """By precision and budget the rows of its policies; what has no budget is in all columns of its precision."""
    found = []
    for setting in dict.fromkeys(_setting(r) for r in rows):
        own = [r for r in rows if _setting(r) == setting]
        free = {r["policy"]: r for r in own if not r["budget"]}
        for budget in dict.fromkeys(r["budget"] for r in own if r["budget"]):
            found.append((setting, budget, free | {r["policy"]: r for r in own if r["budget"] == budget}))
    return found


def _setting(row: Row) -> str:
    return row["dtype"] + (" channels_last" if row["channels_last"] else "")


def _budget_bytes(found: dict[str, Row]) -> int | None:
    return next((r["budget_bytes"] for r in found.values() if r.get("budget_bytes")), None)


def _fastest(found: dict[str, Row]) -> Row | None:
    """Of the steps whose measured peak is within the budget."""
    limit = _budget_bytes(found)
    within = [r for r in found.values() if limit and r.get("measured_peak_bytes", limit + 1) <= limit]
    return min(within, key=lambda r: r["measured_s"], default=None)


def _cell(row: Row | None, fastest: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    predicted = f" ({1e3 * row['predicted_s']:.0f})" if "predicted_s" in row else ""
    planned = f" ({row['peak_bytes'] / GIB:.1f})" if "peak_bytes" in row else ""
    text = f"{1e3 * row['measured_s']:.0f}{predicted} ms, {row['measured_peak_bytes'] / GIB:.1f}{planned} GiB"
    unmet = row["budget"] and row["budget_bytes"] is None
    return f"**{text}**" if row is fastest else text + ("†" if unmet else "")


def verdict(rows: list[Row]) -> str:
    """How often `optimal`, as it is or as a CUDA graph, was the fastest, and how close predictions were."""
    columns = [
        found
        for model in dict.fromkeys(r["model"] for r in rows)
        for *_, found in _columns([r for r in rows if r["model"] == model])
        if any("measured_s" in found.get(name, {}) for name in BEST)
    ]
    first = sum((_fastest(found) or {}).get("policy") in BEST for found in columns)
    planned = [r for r in rows if "ratio" in r]
    near = sum(abs(r["ratio"] - 1) <= WITHIN for r in planned)
    peaks = [100 * (r["measured_peak_bytes"] / r["peak_bytes"] - 1) for r in planned]
    over = sum(r["measured_peak_bytes"] > r["budget_bytes"] for r in planned if r["budget_bytes"])
    return (
        f"`optimal` is the fastest within the budget in {first} of {len(columns)} columns. {near} of {len(planned)} "
        f"predicted steps are within 15 %; measured peaks are {min(peaks):+.1f} to {max(peaks):+.1f} % off the "
        f"predicted ones, {over} above their budget."
    )
