"""Runs the layer benchmark's cases: every case at every size and dtype, a row each.

Sizes are those of the dense tensor. A case is timed only after its check: outputs bit-equal to the oracle or to plain
PyTorch on a sample with NaN, infinities, -0.0 and subnormals in it. A case that fails has a row that says why and no
times. On CUDA the times are the device's own; what launching takes the host is beside them (``host_s``). Percentages
are of a device copy of the same number of dense bytes in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gistkit.benchmark.cases import Case, Setting
from gistkit.benchmark.measure import MIB, copy_gbps, difference, environment, timed, utc

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLE_BYTES = (1 << 18) + 12

Job = tuple[Case, torch.dtype, float, float]


def jobs(
    cases: list[Case],
    dtypes: list[torch.dtype],
    sizes_mib: list[float],
    on_gpu: bool,
    densities: Sequence[float] | None = None,
) -> list[Job]:
    """(case, dtype, density, size) in the order they run: by size, so that a cut run has whole sizes.

    ``densities``: those of the cases for which they matter, in place of their own.
    """
    return [
        (case, dtype, density, size)
        for size in sizes_mib
        for case in cases
        for dtype in (dtypes if case.dtypes is None else case.dtypes)
        for density in (densities if densities and case.by_density else case.densities)
        if on_gpu or not case.cuda_only
    ]


def check(case: Case, dtype: torch.dtype, density: float, device: str, seed: int) -> str:
    """'' where the case gives the right bits on the sample, else what is wrong."""
    try:
        workload = case.make(Setting(device, dtype, SAMPLE_BYTES, density, seed, sample=True))
        return difference(workload.run(), workload.expected())
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def measure(job: Job, device: str, seed: int, copy: float, problem: str, quick: bool) -> dict[str, Any]:
    """One row: what was run, where, and either its times or what is wrong with it."""
    case, dtype, density, size_mib = job
    row: dict[str, Any] = {
        "kind": "layer",
        "time_utc": utc(),
        **environment(device),
        "case": case.name,
        "family": case.family,
        "direction": case.direction,
        "dtype": str(dtype).removeprefix("torch."),
        "size_mib": size_mib,
        "density": density,
        "by_density": case.by_density,
        "lossless": case.lossless,
        "relative_error": case.relative_error,
        "seed": seed,
        "checked": not problem,
    }
    if problem:
        return {**row, "error": problem}
    try:
        workload = case.make(Setting(device, dtype, int(size_mib * MIB), density, seed))
        times = timed(workload.run, device, quick=quick)
    except Exception as error:
        return {**row, "error": _told(error)}
    gbps = workload.moved_bytes / times.median_s / 1e9
    return {
        **row,
        "shape": list(workload.shape),
        "kept_ratio": workload.kept_ratio,
        "median_s": times.median_s,
        "p20_s": times.p20_s,
        "p80_s": times.p80_s,
        "host_s": times.host_s,
        "moved_bytes": workload.moved_bytes,
        "gbps": gbps,
        "copy_gbps": copy,
        "percent_of_copy": 100 * gbps / copy,
    }


def rows(
    todo: list[Job], device: str, quick: bool = False, max_s: float = math.inf, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Measure the jobs one after the other; none is started later than ``max_s`` seconds after the first."""
    copies: dict[float, tuple[float, str]] = {}
    problems: dict[tuple, str] = {}
    deadline = time.monotonic() + max_s
    for job in todo:
        if time.monotonic() > deadline:
            return
        case, dtype, density, size_mib = job
        if size_mib not in copies:
            copies[size_mib] = _copy(size_mib, device, quick)
        copy, problem = copies[size_mib]
        key = (case.name, case.direction, dtype, density)
        if key not in problems:
            problems[key] = check(case, dtype, density, device, seed)
        yield measure(job, device, seed, copy, problems[key] or problem, quick)


def _copy(size_mib: float, device: str, quick: bool) -> tuple[float, str]:
    """(GB/s, '') of a copy of that size, or what stands in its way: two tensors that the device has no memory for."""
    try:
        return copy_gbps(int(size_mib * MIB), device, quick=quick), ""
    except RuntimeError as error:
        return 0.0, _told(error)
