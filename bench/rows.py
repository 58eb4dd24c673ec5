"""What every row says of where it was measured; reading rows back, and saying one beside another."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gistkit.version import VERSION


def utc() -> str:
    """Now, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@cache
def environment(device: str) -> dict[str, Any]:
    """What a row must say about where it was measured."""
    on_gpu = torch.device(device).type == "cuda"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    return {
        "commit": os.environ.get("GISTKIT_COMMIT") or _commit() or f"v{VERSION}",
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "",
        "cpu": "" if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
    }


def _commit() -> str:
    """That of this checkout; '' where it has no history."""
    return _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


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
