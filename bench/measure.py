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
from typing import Any

import torch

MIB = 2**20


@dataclass(frozen=True)
class Times:
    """Seconds of one call: median, 20th and 80th percentile."""

    median_s: float
    p20_s: float
    p80_s: float


def timed(run: Callable[[], Any], device: str, *, quick: bool = False) -> Times:
    """Time one call: on CUDA by events with a flushed L2 (triton.testing.do_bench), elsewhere by a clock, 5 calls."""
    if torch.device(device).type == "cuda":
        from triton.testing import do_bench

        warmup_ms, rep_ms = (5, 20) if quick else (15, 60)
        quantiles: Any = do_bench(run, warmup=warmup_ms, rep=rep_ms, quantiles=[0.5, 0.2, 0.8])
        return Times(*(q / 1e3 for q in quantiles))
    run()
    seconds = sorted(_clocked(run) for _ in range(3 if quick else 5))
    cut = statistics.quantiles(seconds, n=5, method="inclusive")
    return Times(statistics.median(seconds), cut[0], cut[3])


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
        "commit": os.environ.get("GISTKIT_COMMIT") or _output("git", "describe", "--always", "--dirty") or "unknown",
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "",
        "cpu": "" if on_gpu else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]
