"""Runs the layer benchmark's cases: every case at every size and dtype, a row each.

Sizes are those of the dense tensor. A case is timed only after its check: outputs bit-equal to the oracle or to plain
PyTorch on a sample with NaN, infinities, -0.0 and subnormals in it. A case that fails has a row that says why and no
times. On CUDA the times are the device's own; what launching takes the host is beside them (``host_s``). Percentages
are of a device copy of the same number of dense bytes in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gistkit.benchmark.cases import Case, Setting

MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLE_BYTES = (1 << 18) + 12
# GPU cycles that the device idles before each call: half a millisecond, in which the host launches it whole
LEAD_CYCLES = 1_000_000
FLUSH_BYTES = 256 * MIB
Job = tuple[Case, torch.dtype, float, float]


def jobs(cases: list[Case], dtypes: list[torch.dtype], sizes_mib: list[float], on_gpu: bool) -> list[Job]:
    """(case, dtype, density, size) in the order they run: by size, so that a cut run has whole sizes."""
    return [
        (case, dtype, density, size)
        for size in sizes_mib
        for case in cases
        for dtype in (dtypes if case.dtypes is None else case.dtypes)
        for density in case.densities
        if on_gpu or not case.cuda_only
    ]


def rows(todo: list[Job], device: str, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Measure the jobs one after the other."""
    copied = cache(lambda size_mib: copy_gbps(int(size_mib * MIB), device, quick=quick))
    checked = cache(lambda case, dtype, density: check(case, dtype, density, device))
    for job in todo:
        yield _row(job, device, copied(job[3]), checked(*job[:3]), quick)


def check(case: Case, dtype: torch.dtype, density: float, device: str) -> str:
    """'' where the case gives the right bits on the sample, else what is wrong."""
    try:
        workload = case.make(Setting(device, dtype, SAMPLE_BYTES, density, sample=True))
        return difference(workload.run(), workload.expected())
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _row(job: Job, device: str, copy: float, problem: str, quick: bool) -> dict[str, Any]:
    """What was run, and either its times or what is wrong with it."""
    case, dtype, density, size_mib = job
    row = {"case": case.name, "dtype": str(dtype).removeprefix("torch."), "size_mib": size_mib, "density": density}
    about = ("family", "direction", "by_density", "lossless", "relative_error")
    row |= {name: getattr(case, name) for name in about} | {"checked": not problem}
    if problem:
        return {**row, "error": problem}
    try:
        workload = case.make(Setting(device, dtype, int(size_mib * MIB), density))
        times = timed(workload.run, device, quick=quick)
    except Exception as error:
        return {**row, "error": _told(error)}
    gbps = workload.moved_bytes / times.median_s / 1e9
    found = {"shape": list(workload.shape), "kept_ratio": workload.kept_ratio, **asdict(times)}
    found |= {"moved_bytes": workload.moved_bytes, "gbps": gbps, "copy_gbps": copy}
    return {**row, **found, "percent_of_copy": 100 * gbps / copy}


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
    """Seconds between two events around each call, and of the host's launching it; the L2 is flushed before each. The
    device idles until the call is launched, so that no wait for the host is timed."""
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


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bits (so NaN equals NaN, and -0.0 differs from 0.0), wherever the two lie."""
    octets = (x.detach().cpu().flatten().view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*octets)


def difference(got: Any, want: Any) -> str:
    """'' where both hold the same tensors bit for bit, wherever they lie, else what differs."""
    ours, theirs = tree_leaves(got), tree_leaves(want)
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors instead of {len(theirs)}"
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not bit_equal(a, b):
            return f"output {i}: {a.dtype} {list(a.shape)} differs in bits from {b.dtype} {list(b.shape)}"
    return ""
