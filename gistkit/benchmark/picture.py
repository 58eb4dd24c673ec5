"""A picture of the layer benchmark's rows, by matplotlib (``gistkit[plot]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DIRECTIONS = ("forward", "encode", "pack", "encode_within", "encode_spilled", "decode", "relu_backward", "backward")
COLOURS: tuple[str, ...] = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
COPY = "#d55e00"
GAP = 0.7
"""Between the bars of two cases, in bars."""
WIDE_RANGE = 30
"""From this ratio of the fastest case to the slowest on the scale is logarithmic: a CPU's oracles beside its copies."""

Row = dict[str, Any]


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Draw GB/s by case, a column a direction, a bar and colour a dtype, PyTorch's own hatched, and write the picture.

    ``rows`` as :func:`gistkit.benchmark.run.rows` makes them; those of the largest size that were timed are drawn, the
    copy of that size as a line. Overwrites ``path``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [r for r in rows if "gbps" in r]
    size_mib = max((r["size_mib"] for r in timed), default=0)
    shown = [r for r in timed if r["size_mib"] == size_mib]
    directions = [d for d in DIRECTIONS if any(r["direction"] == d for r in shown)] or ["encode"]
    places, ticks, bars = _places(shown)
    figure = Figure(figsize=(max(7.5, 2 + 2.6 * len(directions)), 2 + 0.15 * bars), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(1, len(directions), sharex=True, sharey=True, squeeze=False)[0]
    colours = dict(zip(dict.fromkeys(r["dtype"] for r in shown), COLOURS, strict=False))
    for axes, direction in zip(columns, directions, strict=True):
        _draw(axes, [r for r in shown if r["direction"] == direction], places, colours)
        axes.set_title(direction, fontsize=10)
    _scale(columns[0], shown)
    columns[0].set_yticks(list(ticks.values()), list(ticks), fontsize=8)
    columns[0].set_ylim(bars, -GAP)
    figure.suptitle(_conditions(shown, size_mib), fontsize=10)
    _legend(figure, colours, any(r["family"] == "rival" for r in shown))
    figure.savefig(path)


def _name(row: Row) -> str:
    return f"{row['case']}, {row['density']:.0%} not zero" if row["by_density"] else row["case"]


def _places(rows: list[Row]) -> tuple[dict[tuple[str, str], float], dict[str, float], float]:
    """(where the bar of a case and dtype lies, where that of a case's name, where all of them end)."""
    dtypes: dict[str, list[str]] = {}
    for row in rows:
        of_case = dtypes.setdefault(_name(row), [])
        if row["dtype"] not in of_case:
            of_case.append(row["dtype"])
    places, ticks, at = {}, {}, 0.0
    for name, of_case in dtypes.items():
        places |= {(name, dtype): at + i for i, dtype in enumerate(of_case)}
        ticks[name] = at + (len(of_case) - 1) / 2
        at += len(of_case) + GAP
    return places, ticks, max(at, 1.0)


def _draw(axes: Any, rows: list[Row], places: dict[tuple[str, str], float], colours: dict[str, str]) -> None:
    for row in rows:
        at, colour = places[_name(row), row["dtype"]], colours[row["dtype"]]
        rival = {"facecolor": "white", "edgecolor": colour, "hatch": "//////", "linewidth": 0.6}
        axes.barh(at, row["gbps"], 0.9, **(rival if row["family"] == "rival" else {"color": colour}))
        share = f"{row['percent_of_copy']:.{0 if row['percent_of_copy'] >= 10 else 1}f} %"
        text = axes.annotate(share, (row["gbps"], at), (3, 0), textcoords="offset points", va="center", fontsize=6.5)
        text.set_bbox({"facecolor": "white", "linewidth": 0, "pad": 0.5})
    for copy in {r["copy_gbps"] for r in rows}:
        axes.axvline(copy, color=COPY, linestyle="--", linewidth=1)
    axes.set_xlabel("GB/s", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axes: Any, rows: list[Row]) -> None:
    least = min((r["gbps"] for r in rows), default=1.0)
    most = max((max(r["gbps"], r["copy_gbps"]) for r in rows), default=1.0)
    if most > WIDE_RANGE * least:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(least / 2, most * 5)
    else:
        axes.set_xlim(0, most * 1.2)


def _conditions(rows: list[Row], size_mib: float) -> str:
    if not rows:
        return "no case was timed"
    first = rows[0]
    place = first["gpu"] or f"CPU ({first['cpu']})"
    return (
        f"{place}, torch {first['torch']}, tensors of {size_mib:g} MiB\n"
        f"bytes read and written a second, and their share of a copy's, which makes {first['copy_gbps']:,.0f} GB/s"
    )


def _legend(figure: Any, colours: dict[str, str], rivals: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=dtype) for dtype, colour in colours.items()]
    if rivals:
        handles.append(Patch(facecolor="white", edgecolor="#555555", hatch="//////", label="PyTorch's own"))
    handles.append(Line2D([], [], color=COPY, linestyle="--", linewidth=1, label="a copy"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


__all__ = ["plot_rows"]
