"""Times, bit equality, and the facts about the machine that every row carries."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gistkit.version import VERSION

MIB = 2**20


# GPU cycles that the device idles before each call: half a millisecond, in which the host launches it whole
LEAD_CYCLES = 1_000_000
FLUSH_BYTES = 256 * MIB


@dataclass(frozen=True)
class Times:
    """Seconds of one call: median, 20th and 80th percentile; ``host_s`` what launching it takes the host (median)."""

    median_s: float
    p20_s: float
    p80_s: float
    host_s: float


def timed(run: Callable[[], Any], device: str, *, quick: bool = False) -> Times:
    """Time one call: on CUDA the device's own time (:func:`_device_times`), elsewhere by a clock, 5 calls."""
    run()
    if torch.device(device).type == "cuda":
        seconds, host = _device_times(run, device, quick)
    else:
        host = seconds = [_clocked(run) for _ in range(3 if quick else 5)]
    cut = statistics.quantiles(seconds, n=5, method="inclusive")
    return Times(statistics.median(seconds), cut[0], cut[3], statistics.median(host))


def _device_times(run: Callable[[], Any], device: str, quick: bool) -> tuple[list[float], list[float]]:
    """Seconds between two events around each call, and of the host's launching it.

    The L2 is flushed before each. The device idles until the host has launched the call, so that what is timed is the
    kernels and no wait for the host, however small the tensors are.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    calls, host = [], []
    for _ in range(8 if quick else 25):
        flush.zero_()
        torch.cuda._sleep(LEAD_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        host.append(_clocked(run))
        end.record()
        calls.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in calls], host


def _clocked(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def copy_gbps(nbytes: int, device: str, *, quick: bool = False) -> float:
    """GB/s (read plus written) of ``dst.copy_(src)`` over nbytes on the device: the yardstick of the same run."""
    src = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    dst = torch.empty_like(src)
    return 2 * nbytes / timed(lambda: dst.copy_(src), device, quick=quick).median_s / 1e9


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples and lists, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)]


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bits (so NaN equals NaN, and -0.0 differs from 0.0), wherever the two lie."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().cpu().contiguous()
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def difference(got: Any, want: Any) -> str:
    """'' where both hold the same tensors bit for bit, else what differs."""
    ours, theirs = tensors(got), tensors(want)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors instead of {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not bit_equal(a, b):
            return f"output {i}: {a.dtype} {list(a.shape)} differs in bits from {b.dtype} {list(b.shape)}"
    return ""


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
    """That of the checkout which this file is tracked in; '' for an installed package, wherever it lies."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    if not _output(*git, "ls-files", "--error-unmatch", here.name):
        return ""
    return _output(*git, "describe", "--always", "--dirty")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]
