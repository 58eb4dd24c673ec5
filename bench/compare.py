"""Two runs side by side: python -m bench.compare OLD.jsonl NEW.jsonl

A change is called one only where the ranges between the 20th and the 80th percentile do not overlap.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.rows import key, read


def verdict(old: dict[str, Any], new: dict[str, Any]) -> str:
    """``faster``, ``slower``, ``same`` (ranges overlap), or what happened to the case's check."""
    if "error" in old or "error" in new:
        return "fails in both" if "error" in old and "error" in new else "fixed" if "error" in old else "broken"
    if new["p80_s"] < old["p20_s"]:
        return "faster"
    return "slower" if new["p20_s"] > old["p80_s"] else "same"


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[tuple[tuple, str, float | None]]:
    """(key, verdict, new time / old time) of the cases that both runs have, in the new run's order."""
    before = {key(r): r for r in old}
    pairs = [(before[key(r)], r) for r in new if key(r) in before]
    return [(key(b), verdict(a, b), _ratio(a, b)) for a, b in pairs]


def _ratio(old: dict[str, Any], new: dict[str, Any]) -> float | None:
    return new["median_s"] / old["median_s"] if "median_s" in old and "median_s" in new else None


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 1 where a case became slower or broke."""
    parser = argparse.ArgumentParser(prog="bench.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--all", action="store_true", help="show unchanged cases too")
    args = parser.parse_args(argv)
    old, new = read(args.old), read(args.new)
    compared = compare(old, new)
    shown = Table(title=f"{args.old.name} → {args.new.name}", header_style="bold")
    for name in ("case", "verdict", "time ratio"):
        shown.add_column(name, justify="right" if name == "time ratio" else "left")
    for case, what, ratio in compared:
        if args.all or what != "same":
            shown.add_row(" ".join(map(str, case[1:])), what, "" if ratio is None else f"{ratio:.2f}")
    Console(width=120).print(shown)
    machines = {(r["gpu"], r["torch"], r["triton"]) for r in old + new}
    if len(machines) > 1:
        print(f"different machines or versions: {sorted(machines)}")
    print(
        f"{len(compared)} cases in both, {len(old) - len(compared)} only in the old run, {len(new) - len(compared)} new"
    )
    return 1 if any(what in ("slower", "broken") for _, what, _ in compared) else 0


if __name__ == "__main__":
    sys.exit(main())
