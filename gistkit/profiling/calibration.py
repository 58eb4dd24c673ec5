"""What the device at hand can do, measured: a :class:`gistkit.planning.cost.devices.Hardware` for the planner.

Every figure is the best of a few timings of PyTorch's own operators, the device drained before and after: what others
do on the machine only adds to a timing. A copy is a ``clone``: it writes new memory, as a step does.

What was measured is kept, one JSON file a card and version of PyTorch, in the folder ``$GISTKIT_CACHE``, else
``$XDG_CACHE_HOME/gistkit``, else ``~/.cache/gistkit``. A file that cannot be read or written is no error: the card is
measured anew.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gistkit.codecs import CODECS
from gistkit.planning.cost import (
    CUDA_LIBRARIES_BYTES,
    MEASURED_DENSITY,
    PRESETS,
    Hardware,
    passes,
    preset_name,
)
from gistkit.profiling.host import HostTimes, host_task_s, rounded

MIB = 2**20
REPEATS = 5
CODECS_TIMED = ("mask1", "zvc", "fp8s")


class _Sizes(NamedTuple):
    """How much work one timing is; ``side`` is that of a product, ``inner`` the times a call is repeated in it."""

    copy_bytes: int
    codec_bytes: int
    side: int
    inner: int


_CPU, _CUDA = _Sizes(64 * MIB, 4 * MIB, 384, 1), _Sizes(512 * MIB, 256 * MIB, 8192, 10)


def calibrate(device: str | torch.device = "cuda") -> Hardware:
    """Measure a device: copy bandwidth, link each way and both ways at once, arithmetic by dtype, launch, codecs, host.

    ``device``: ``cpu``, ``cuda`` or ``cuda:N``. A CPU has no link, and is its own host. Needs about 2 GiB of device
    memory and 0.5 GiB of pinned host memory on CUDA, 0.2 GiB on a CPU, and a few seconds; synchronises. Random states
    stay as they are, and autocast does not act. Raises ValueError for a device that is neither or is not there.
    """
    place = checked_device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    forked = torch.random.fork_rng([place] if place.type == "cuda" else [])
    with forked, torch.autocast(place.type, enabled=False), torch.enable_grad():
        return _measured(place)


def _measured(place: torch.device) -> Hardware:
    on_gpu = place.type == "cuda"
    sizes, name = _CPU, f"{platform.machine()} {torch.get_num_threads()} threads"
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if on_gpu:
        sizes, name = _CUDA, torch.cuda.get_device_name(place)
        memory_bytes = torch.cuda.get_device_properties(place).total_memory
    host = host_task_s(place) if on_gpu else HostTimes()
    with torch.no_grad():
        source = torch.ones(sizes.copy_bytes // 4, device=place)
        memory_gbps = rounded(2 * sizes.copy_bytes / seconds(source.clone, place, sizes.inner) / 1e9)
        del source
        d2h_gbps, h2d_gbps, both_gbps, interference = _link(place, sizes) if on_gpu else (0.0,) * 4
        x = torch.zeros(1, device=place)
        return Hardware(
            name=name,
            memory_bytes=memory_bytes,
            memory_gbps=memory_gbps,
            d2h_gbps=d2h_gbps,
            h2d_gbps=h2d_gbps,
            both_gbps=both_gbps,
            flops=_rates(place, sizes),
            launch_s=rounded(seconds(lambda: x.add_(1), place, inner=1000)),
            async_counts=on_gpu,
            codec_slowdown=_codec_slowdown(place, sizes, memory_gbps),
            libraries_bytes=CUDA_LIBRARIES_BYTES if on_gpu else 0,
            **host._asdict(),
            link_interference=interference,
            source=f"calibrated {datetime.now(timezone.utc).date()}, torch {torch.__version__}",
        )


def cache_folder() -> Path:
    """The folder of gistkit's caches: ``$GISTKIT_CACHE``, else ``gistkit`` in the user's cache folder."""
    own, shared = os.environ.get("GISTKIT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "gistkit"


def write_cached(path: Path, content: bytes) -> bool:
    """Write a file of a cache, in whole or not at all; whether it could be written."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:
        return False
    return True


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
    return path if write_cached(path, found.to_json().encode() + b"\n") else None


def card(name: str, memory_bytes: int) -> Hardware | None:
    """The preset of a CUDA card by its name, with its memory and what PyTorch's libraries take; None without one."""
    preset = preset_name(name)
    if preset is None:
        return None
    return replace(PRESETS[preset], memory_bytes=memory_bytes, libraries_bytes=CUDA_LIBRARIES_BYTES)


def card_at_hand(device: torch.device) -> Hardware:
    """The hardware of a CUDA device of this machine, with its real memory. Its rates are kept ones, else those of its
    preset, else measured ones, in a few seconds, and kept. Raises ValueError where it has no memory left."""
    found = torch.cuda.get_device_properties(device)
    known = kept_calibration(found.name) or card(found.name, found.total_memory)
    if known is not None:
        return replace(known, memory_bytes=found.total_memory)
    try:
        measured = calibrate(device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"hardware must be known, and {found.name}, which has no preset, has no memory left to be measured "
            f"({str(error).splitlines()[0]}); run `gistkit calibrate` before the model is on it, or pass hardware="
        ) from error
    keep_calibration(measured)
    return measured


def checked_device(device: str | torch.device, who: str = "calibrate") -> torch.device:
    """The device, ``cpu``, ``cuda`` or ``cuda:N``. Raises ValueError, in ``who``'s name, for any other."""
    got = str(device) if isinstance(device, torch.device) else device
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise ValueError(f"{who}: device must be cpu, cuda or cuda:N, got {got!r}; name one of these")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        seen = f"torch sees {torch.cuda.device_count()} CUDA devices"
        raise ValueError(f"{who}: device must be there, got {got!r}, but {seen}; use 'cpu' or one of these")
    return place


def seconds(run: Callable[[], Any], device: torch.device, inner: int = 1) -> float:
    """Seconds of one call: the best of some timings of ``inner`` calls, after a warm-up. Synchronises."""
    drain = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    found = []
    for _ in range(REPEATS + 1):
        drain()
        start = time.perf_counter()
        for _ in range(inner):
            run()
        drain()
        found.append((time.perf_counter() - start) / inner)
    return min(found[1:])


def _link(device: torch.device, sizes: _Sizes) -> tuple[float, float, float, float]:
    """GB/s to the host, from it and of both at once, between pinned memory and the device on streams of their own; and
    by which share an elementwise kernel takes longer beside that, the median of the three."""
    nbytes = sizes.copy_bytes // 2
    hosts = [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    devices = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    d2h, h2d = ((torch.cuda.Stream(device), *pair) for pair in ((hosts[0], devices[0]), (devices[1], hosts[1])))

    def run(*copies: tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]) -> None:
        for stream, to, source in copies:
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)

    x, ways = torch.zeros(sizes.copy_bytes // 4, device=device), ((d2h,), (h2d,), (d2h, h2d))

    def kernels_s(*copies: tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]) -> float:
        torch.cuda.synchronize(device)
        for _ in range(sizes.inner):  # as many as kernels: a copy over the link takes longer than one
            run(*copies)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        for _ in range(sizes.inner):
            x.add_(1)
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    rates = [len(w) * nbytes / seconds(lambda w=w: run(*w), device, sizes.inner) / 1e9 for w in ways]
    alone_s, *beside_s = (statistics.median(kernels_s(*w) for _ in range(REPEATS)) for w in ((), *ways))
    interference = max(0.0, statistics.median(beside_s) / alone_s - 1)
    torch.cuda.synchronize(device)
    out_gbps, in_gbps, both_gbps = rates[0], rates[1], min(rates[2], rates[0] + rates[1])
    return rounded(out_gbps), rounded(in_gbps), rounded(both_gbps), rounded(interference)


def _rates(device: torch.device, sizes: _Sizes) -> dict[str, float]:
    """Operations per second of square products, and of fp32 convolutions where these run on TF32."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.ones(sizes.side, sizes.side, dtype=dtype, device=device)
        rates[str(dtype).removeprefix("torch.")] = rounded(2 * sizes.side**3 / seconds(lambda a=a: a @ a, device))
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        n, channels, side = 64, 256, 56
        x = torch.ones(n, channels, side, side, device=device).contiguous(memory_format=torch.channels_last)
        weight = torch.ones(channels, channels, 3, 3, device=device).contiguous(memory_format=torch.channels_last)
        taken_s = seconds(lambda: F.conv2d(x, weight, padding=1), device, sizes.inner)
        rates["tf32"] = rounded(2 * n * channels * channels * 9 * side * side / taken_s)
    return rates


def _codec_slowdown(device: torch.device, sizes: _Sizes, memory_gbps: float) -> float:
    """How many times longer codecs take than the measured table says of this bandwidth: the median of a few."""
    x = torch.relu(torch.randn(sizes.codec_bytes // 4, device=device))
    pass_s = x.nbytes / (memory_gbps * 1e9)
    found = []
    for name in CODECS_TIMED:
        codec, cost = CODECS[name], passes(name, 4, MEASURED_DENSITY)
        encoded = codec.encode(x)
        found.append(seconds(lambda c=codec: c.encode(x), device) / (cost.encode * pass_s))
        found.append(seconds(lambda c=codec, e=encoded: c.decode(e), device) / (cost.decode * pass_s))
    return rounded(statistics.median(found))
