"""Reading rows back."""

from __future__ import annotations

import json
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
