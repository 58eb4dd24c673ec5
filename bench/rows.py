"""Reading rows back, and saying one beside another."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a JSONL file, of one kind or of all. Raises ValueError, naming the line, where a line is no row."""
    found = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: expected one JSON object a line ({error})") from error
                if kind is None or row["kind"] == kind:
                    found.append(row)
    return found


def beside(row: dict[str, Any], other: dict[str, Any], keys: Iterable[str]) -> str:
    """The row's figures in words, each with its multiple of the other's where that has it."""
    found = [k for k in keys if k in row]
    shares = [f" ({row[k] / other[k]:.2f}x)" if other.get(k) else "" for k in found]
    return ", ".join(f"{k.replace('_', ' ')} {row[k]:.1f}{share}" for k, share in zip(found, shares, strict=True))
