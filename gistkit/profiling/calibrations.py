"""Calibrations that this user's machine has made, one JSON file a card and version of PyTorch, in the cache folder.

The folder is ``$GISTKIT_CACHE``, else ``$XDG_CACHE_HOME/gistkit``, else ``~/.cache/gistkit``. A file that cannot be
read or written is no error: the card is measured anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from gistkit.planning.cost import Hardware
from gistkit.profiling.calibration import calibrate


def cache_folder() -> Path:
    """Where gistkit keeps what it has measured for this user."""
    own, shared = os.environ.get("GISTKIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "gistkit"


def calibration_file(device_name: str) -> Path:
    """The file of a device's rates under this PyTorch."""
    card, version = (re.sub(r"[^A-Za-z0-9.+-]+", "-", text) for text in (device_name, str(torch.__version__)))
    return cache_folder() / "hardware" / f"{card}-torch-{version}.json"


def kept_calibration(device_name: str) -> Hardware | None:
    """The rates that were measured on a device of this name under this PyTorch; None where there are none."""
    try:
        found = Hardware.from_json(calibration_file(device_name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.name == device_name else None


def keep_calibration(found: Hardware) -> Path | None:
    """Write rates where :func:`kept_calibration` finds them; the file, None where it cannot be written."""
    path = calibration_file(found.name)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(found.to_json() + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        return None
    return path


def calibrated(device: torch.device, measure: Callable[[torch.device], Hardware] = calibrate) -> Hardware:
    """The rates of a CUDA device: kept ones, else measured ones, which takes a few seconds and is kept. Raises
    ValueError where the device has no memory left for it."""
    found = torch.cuda.get_device_properties(device)
    kept = kept_calibration(found.name)
    if kept is not None:
        return replace(kept, memory_bytes=found.total_memory)
    try:
        measured = measure(device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"hardware must be known, and {found.name}, which has no preset, has no memory left to be measured "
            f"({str(error).splitlines()[0]}); run `gistkit calibrate` before the model is on it, or pass hardware="
        ) from error
    keep_calibration(measured)
    return measured
