"""What one run of bench/gpu.sh found, in few lines: python -m bench.summary REPORTS ROWS.jsonl...

REPORTS is a folder with one JUnit report a test file, and a ``.log`` beside each. Failures of the same test with the
same reason are one line, and so are failed benchmark rows with the same reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.rows import key, read

REASON_CHARACTERS = 300


def test_lines(folder: Path) -> list[str]:
    """A line a test file with its counts, below it what failed and the E lines that say why."""
    lines = []
    for log in sorted(folder.glob("*.log")):
        report = log.with_suffix(".xml")
        if not report.exists():
            lines.append(f"{log.stem}: no report, it was cut or never began: {_last_line(log)}")
            continue
        root = ElementTree.parse(report).getroot()
        cases = list(root.iter("testcase"))
        failed = Counter(_failure(case) for case in cases if _problem(case) is not None)
        skipped = sum(case.find("skipped") is not None for case in cases)
        passed = len(cases) - skipped - failed.total()
        lines.append(f"{log.stem}: {passed} passed, {failed.total()} failed, {skipped} skipped")
        lines += [f"  {name} ({count}): {why}" for (name, why), count in failed.items()]
    return lines


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "its log is empty")[:REASON_CHARACTERS]


def _problem(case: ElementTree.Element) -> ElementTree.Element | None:
    failure = case.find("failure")
    return case.find("error") if failure is None else failure


def _failure(case: ElementTree.Element) -> tuple[str, str]:
    """The test without its parameters, and its E lines."""
    problem = _problem(case)
    text = "" if problem is None else problem.text or problem.get("message") or ""
    said = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    why = " / ".join(said) or text.strip().rpartition("\n")[2]
    return (case.get("name") or "").partition("[")[0], why[:REASON_CHARACTERS]


def row_lines(rows: list[dict[str, Any]]) -> list[str]:
    """How many rows there are and failed, then each reason with the cases that it is given for."""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            failed.setdefault(row["error"][:REASON_CHARACTERS], []).append(" ".join(str(k) for k in key(row)[1:]))
    lines = [f"{len(rows)} rows, {sum(map(len, failed.values()))} failed"]
    for why, cases in failed.items():
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        lines.append(f"  {why} ({len(cases)}): {'; '.join(cases[:3])}{more}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command line; a file of rows that is not there was not asked for."""
    parser = argparse.ArgumentParser(prog="bench.summary", description=__doc__)
    parser.add_argument("reports", type=Path)
    parser.add_argument("rows", type=Path, nargs="*")
    args = parser.parse_args(argv)
    print("\n".join(test_lines(args.reports)))
    for path in args.rows:
        if path.exists():
            print("\n".join([path.name, *row_lines(read(path))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
