"""Rich tables as text, and numbers as tables show them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

MIB = 2**20
SHOWN = 40
"""Rows of a table."""
NO_EDGE = 10_000
"""Columns of what is no terminal: more than any table has."""


class _Console(Console):
    """Texts are shown as they are: names of layers and folders may look like rich's markup."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(width=width, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Leave it to the command, where rich would end the process with status 1."""
        raise BrokenPipeError


def console() -> Console:
    """For standard output: as wide as the terminal. A pipe or a file has no edge, so nothing is cut there, unless
    ``COLUMNS`` says how wide it is to be."""
    shown = _Console()
    return shown if shown.file.isatty() or "COLUMNS" in os.environ else _Console(NO_EDGE)


def rendered(parts: Iterable[RenderableType], width: int = 120) -> str:
    """Tables and texts one below the other, as plain text."""
    console = _Console(width)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get()


def table(title: str, *columns: str, wrap: bool = False, **style) -> Table:
    """An empty table; ``>`` before a column's name aligns it on the right. ``wrap``: cells may take several lines."""
    made = Table(title=title, **style)
    for name in columns:
        made.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", no_wrap=not wrap)
    return made


def kept_table(title: str, columns: Mapping[str, str], rows: Iterable[Any], where: str) -> Table:
    """A table of kept tensors: of the largest, by column, an attribute; plain and kept bytes and why; ``where`` all
    are."""
    shown = table(title, *columns, ">plain MiB", ">kept MiB", "why", wrap=True)
    ordered = sorted(rows, key=lambda r: -max(r.plain_bytes, r.kept_bytes))
    for r in ordered[:SHOWN]:
        found = {**vars(r), "shape": "x".join("?" if d < 0 else str(d) for d in r.shape)}
        cells = (found[name] for name in columns.values())
        shown.add_row(*cells, hundredths(r.plain_bytes), hundredths(r.kept_bytes), r.reason)
    if rest := ordered[SHOWN:]:
        sums = (hundredths(sum(r.plain_bytes for r in rest)), hundredths(sum(r.kept_bytes for r in rest)))
        blank = [""] * (len(shown.columns) - 4)
        shown.add_row(f"{len(rest)} smaller ones", *blank, *sums, f"all in {where}")
    return shown


def hundredths(nbytes: float) -> str:
    """MiB with two digits."""
    return f"{nbytes / MIB:.2f}"


def mib(nbytes: float) -> str:
    """MiB with one digit, two below 10."""
    value = nbytes / MIB
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"


def milliseconds(seconds: float) -> str:
    """Milliseconds, with so many digits that a small number still says something."""
    value = seconds * 1e3
    return f"{value:,.3f}" if value < 1 else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
