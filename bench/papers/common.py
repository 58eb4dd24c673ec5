"""Rows of the papers' tables: one published number, ours beside it, and why they differ.

A row *agrees* where ours is within :data:`TOLERANCE` of the paper's, or on the right side of a bound; any other row
must carry a note, and :func:`write` refuses it without one. Seconds and bytes are the planner's: these tables compare
plans, nothing here is run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from bench.rows import environment

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PAPERS = ("gist", "vdnn", "modnn", "cdma")
TOLERANCE = 0.10
EXACT, AT_LEAST, AT_MOST, IMPLIED = "=", ">=", "<=", "implied"
GB = 1e9


@dataclass(frozen=True)
class Row:
    """One published number.

    ``relation`` tells how the text gives it: ``=``, or a bound, ``>=`` or ``<=``; ``implied`` where what ours assumes
    comes from this very number, so that agreement shows no more than a format or an equation. ``density`` is the share
    of non-zero elements that ours assumes and where it is from, "" where no value depends on one. ``ratio`` is ours
    over the paper's. ``batch`` 0: several networks.
    """

    paper: str
    section: str
    network: str
    batch: int
    hardware: str
    metric: str
    unit: str
    relation: str
    paper_value: float
    our_value: float
    ratio: float
    density: str
    note: str
    commit: str
    date: str

    @property
    def agrees(self) -> bool:
        """Whether ours is what the text says, within :data:`TOLERANCE` or on its side of the bound."""
        if self.relation == AT_LEAST and self.our_value >= self.paper_value:
            return True
        if self.relation == AT_MOST and self.our_value <= self.paper_value:
            return True
        return abs(self.ratio - 1) <= TOLERANCE


@dataclass(frozen=True)
class Sheet:
    """What all rows of one run have in common; :meth:`row` makes one of them."""

    paper: str
    hardware: str
    commit: str = ""
    date: str = ""

    def row(
        self,
        section: str,
        network: str,
        batch: int,
        metric: str,
        paper_value: float,
        our_value: float,
        unit: str = "",
        *,
        relation: str = EXACT,
        density: str = "",
        note: str = "",
    ) -> Row:
        """A row; ``our_value`` is rounded to four digits, enough for any of the papers'."""
        ours = float(f"{our_value:.4g}")
        ratio = round(ours / paper_value, 3)
        return Row(
            *(self.paper, section, network, batch, self.hardware, metric, unit, relation),
            *(paper_value, ours, ratio, density, " ".join(note.split()), self.commit, self.date),
        )


def path_of(paper: str, folder: Path = RESULTS) -> Path:
    """The file of a paper's rows."""
    return folder / f"papers-{paper}.jsonl"


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows, one JSON object a line. Raises ValueError for one that differs and does not say why."""
    for row in rows:
        if not row.agrees and not row.note:
            raise ValueError(
                f"row {row.paper} {row.section}, {row.network}, {row.metric}: {row.our_value} against the paper's "
                f"{row.paper_value} needs a note that says why"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows), encoding="utf-8")


def read(path: Path) -> list[Row]:
    """The rows of a file. Raises ValueError, naming the line, where one is no row."""
    names = {f.name for f in fields(Row)}
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        raw = json.loads(line)
        if set(raw) != names:
            raise ValueError(f"{path}, line {number}: expected the fields {sorted(names)}, got {sorted(raw)}")
        rows.append(Row(**raw))
    return rows


def commit() -> str:
    """The commit that ran, as the layer benchmark's rows have it."""
    return environment("cpu")["commit"]


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean."""
    found = list(values)
    return sum(found) / len(found)


def say(what: str) -> None:
    """A line of progress."""
    print(what, file=sys.stderr, flush=True)


def run(paper: str, hardware: str, rows: Callable[[Sheet], Iterable[Row]]) -> None:
    """Make a paper's rows, say each, and write them to its file."""
    sheet = Sheet(paper, hardware, commit(), datetime.now(timezone.utc).strftime("%Y-%m-%d"))
    found = []
    for row in rows(sheet):
        found.append(row)
        sign = "  " if row.agrees else "! "
        batch = f" ({row.batch})" if row.batch else ""
        print(f"{sign}{row.network}{batch}, {row.metric}: {row.our_value:g} / {row.paper_value:g} {row.unit}".rstrip())
    write(found, path_of(paper))
    say(f"wrote {len(found)} rows to {path_of(paper).relative_to(ROOT)}; `python -m bench.papers.page` makes the page")
