"""What the offloader gets out of the link, on the CUDA device at hand.

    python -m bench.offload --out bench/results/NAME.jsonl [--max-s 120]

Rows of kind ``link``: a pinned copy of 512 MiB each way alone and both at once, the ceiling.

Rows of kind ``host``: microseconds of the host a ``put``, ``release``, ``prefetch``, ``get`` and drop of tensors so
small that the device is never the limit, dense and as ``zvc`` in a lane, and all of them together (``parcel_us``). One
row a codec says where that goes (``of: calls``): ``put_launch_us`` are the microseconds of one put that are spent in
launches, ``put_launch_n`` how many there are; likewise the driver's copies and events, allocations of device memory,
and the views that an arrival is seen through. The rest is the offloader's own Python. One row has the driver's calls
alone and another one what PyTorch takes for the same: ``copy_`` under ``torch.cuda.stream``, events.

Rows of kind ``wire``: tensors of one size and density, dense and as ``zvc``, encoded beforehand, all of them enqueued
while the copy stream sleeps, so that the host is no limit; fetched again in stack order in the same way. ``d2h_gbps``
and ``h2d_gbps`` are bytes on the wire a second, ``d2h_share`` and ``h2d_share`` of the ceiling, ``raw_gbps`` the
tensors' own bytes by the time of the way out. What came back is compared bit for bit. Exit status 1 where a bit
differs, 2 without a CUDA device. A row is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.rows import environment, utc
from gistkit.codecs import CODECS, Encoded, Sparse
from gistkit.kernels.launch.tiling import Ready
from gistkit.runtime.offload.backends import CudaBackend
from gistkit.runtime.offload.lanes import Kind
from gistkit.runtime.offload.offloader import Offloader
from gistkit.runtime.offload.parcel import Parcel

MIB = 2**20
LINK_BYTES, TOTAL_BYTES = 512 * MIB, 1024 * MIB
LANE_BYTES = int(1.3 * TOTAL_BYTES)
SIZES_MIB = (1, 4, 16, 64, 256)
DENSITIES = (0.1, 0.3, 0.5, 0.7, 0.9)
SLEEP_CYCLES = 400_000_000
SMALL_ITEMS, SMALL_PARCELS, ROUNDS = 4096, 24, 20
"""Of the rows ``host``: few enough that the streams' queues are never full."""
NO_BOUND = 2**62


def timed(stream: torch.cuda.Stream, work: Callable[[], Any], asleep: bool = False) -> tuple[float, Any]:
    """Seconds on the device from the first to the last work of a stream, with nothing else on it before. ``asleep``:
    the stream begins when all has been enqueued."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if asleep:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
    start.record(stream)
    made = work()
    end.record(stream)
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, made


def link_row(backend: CudaBackend) -> dict[str, float]:
    """The ceiling each way, alone and together, in GB/s."""
    here = [torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    there = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    d2h, h2d = backend.torch_stream(backend.d2h), backend.torch_stream(backend.h2d)

    def out() -> None:
        with torch.cuda.stream(d2h):
            there[0].copy_(here[0], non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(h2d):
            here[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        out()
        back()
        d2h.wait_stream(h2d)

    found = {}
    for name, stream, work, times in (("d2h", d2h, out, 1), ("h2d", h2d, back, 1), ("both", d2h, both, 2)):  # fmt: skip
        work()
        found[f"{name}_gbps"] = times * LINK_BYTES / min(timed(stream, work)[0] for _ in range(3)) / 1e9
    return found


def median_us(count: int, rounds: int, work: Callable[[], Any]) -> float:
    """Microseconds of the host for one of ``count``: the median over rounds, each begun with an idle device."""
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(taken)


def host_row(offloader: Offloader, name: str) -> dict[str, Any]:
    """A small parcel's calls, of a codec."""
    found = parcel_us(offloader, name, [""])
    return {"codec": name, "of": "offloader", **found, "parcel_us": sum(found.values())}


def calls_row(offloader: Offloader, name: str) -> dict[str, Any]:
    """Where they go. Each call that is watched takes some 0.2 us more, most of which counts as Python's own."""
    backend = offloader.backend
    assert isinstance(backend, CudaBackend)
    driver, spent = backend.driver, defaultdict(float)
    watched: tuple[tuple[Any, str, str], ...] = (
        (Ready, "at", "launch"), (driver, "copy", "copy"), (driver, "record", "event"), (driver, "wait", "event"),
        (driver, "query", "event"), (backend, "empty", "empty"), (Kind, "payload", "views"),
    )  # fmt: skip
    step = [""]

    def watch(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            spent[f"{step[0]}_{kind}_us"] += (time.perf_counter() - start) * 1e6
            spent[f"{step[0]}_{kind}_n"] += 1
            return result

        return call

    parcel_us(offloader, name, step)  # what is compiled and pinned first counts for nothing
    with ExitStack() as patches:
        for owner, attribute, kind in watched:
            patches.enter_context(mock.patch.object(owner, attribute, watch(getattr(owner, attribute), kind)))
        parcel_us(offloader, name, step)
    parcels = (ROUNDS + 3) * SMALL_PARCELS
    return {"codec": name, "of": "calls", **{what: total / parcels for what, total in spent.items()}}


def parcel_us(offloader: Offloader, name: str, step: list[str]) -> dict[str, float]:
    """Microseconds of each call; a round is put, released, prefetched, taken and dropped, and ``step[0]`` is which."""
    codec, x = CODECS[name], torch.relu(torch.randn(SMALL_ITEMS, device="cuda"))
    begin = codec.begin if isinstance(codec, Sparse) else codec.encode
    taken: dict[str, list[float]] = {}
    for _ in range(ROUNDS + 3):
        step[0] = "encode"
        encoded = [begin(x) for _ in range(SMALL_PARCELS)]
        parcels: list[Parcel] = []

        def put(sent: list[Encoded], into: list[Parcel]) -> None:
            into.extend([offloader.put(each) for each in sent])

        def drop(of: list[Parcel]) -> None:
            del of[:]
            offloader.trim(NO_BOUND)

        for what, work in {
            "put": lambda e=encoded, p=parcels: put(e, p),
            "release": lambda p=parcels: [each.release() for each in p],
            "prefetch": lambda p=parcels: [each.prefetch() for each in reversed(p)],
            "get": lambda p=parcels: [each.get() for each in p] and None,
            "drop": lambda p=parcels: drop(p),
        }.items():
            step[0] = what
            taken.setdefault(f"{what}_us", []).append(median_us(SMALL_PARCELS, 1, work))
    return {what: statistics.median(each[3:]) for what, each in taken.items()}


def driver_row(backend: CudaBackend) -> dict[str, Any]:
    """The driver's calls, through what the offloader calls."""
    here = torch.empty(SMALL_ITEMS, dtype=torch.uint8, device="cuda")
    there = torch.empty(SMALL_ITEMS, dtype=torch.uint8, pin_memory=True)
    event, calls = backend.record(backend.d2h), range(100)
    work: dict[str, Callable[[], Any]] = {
        "copy": lambda: [backend.copy(there.data_ptr(), here.data_ptr(), SMALL_ITEMS, backend.d2h) for _ in calls],
        "record": lambda: [backend.record(backend.d2h) for _ in calls],
        "wait": lambda: [backend.wait(backend.h2d, event) for _ in calls],
        "query": lambda: [backend.done(event) for _ in calls],
        "empty": lambda: [backend.empty(SMALL_ITEMS, backend.compute()) for _ in calls],
    }
    return {"of": "driver", **{f"{name}_us": median_us(len(calls), ROUNDS, each) for name, each in work.items()}}


def torch_row(backend: CudaBackend) -> dict[str, Any]:
    """The same by PyTorch."""
    here = torch.empty(SMALL_ITEMS, dtype=torch.uint8, device="cuda")
    there = torch.empty(SMALL_ITEMS, dtype=torch.uint8, pin_memory=True)
    d2h, h2d = backend.torch_stream(backend.d2h), backend.torch_stream(backend.h2d)
    event, calls = d2h.record_event(), range(100)

    def copy() -> None:
        for _ in calls:
            with torch.cuda.stream(d2h):
                there.copy_(here, non_blocking=True)

    work: dict[str, Callable[[], Any]] = {
        "copy": copy,
        "record": lambda: [d2h.record_event() for _ in calls],
        "wait": lambda: [h2d.wait_event(event) for _ in calls],
        "query": lambda: [event.query() for _ in calls],
        "empty": lambda: [torch.empty(SMALL_ITEMS, dtype=torch.uint8, device="cuda") for _ in calls],
    }
    return {"of": "torch", **{f"{name}_us": median_us(len(calls), ROUNDS, each) for name, each in work.items()}}


def wire_row(offloader: Offloader, link: dict[str, float], size_mib: int, density: float | None) -> dict[str, Any]:
    """One size, dense or as zvc at a density."""
    backend = offloader.backend
    assert isinstance(backend, CudaBackend)
    d2h, h2d = backend.torch_stream(backend.d2h), backend.torch_stream(backend.h2d)
    count = max(2, min(32, TOTAL_BYTES // (size_mib * MIB)))
    xs = [torch.relu(torch.randn(size_mib * MIB // 4, device="cuda")) for _ in range(count)]
    if density is not None:
        for x in xs:
            x.copy_(torch.where(torch.rand_like(x) < density, x.abs() + 1, 0))
    codec = CODECS["dense" if density is None else "zvc"]
    begin = codec.begin if isinstance(codec, Sparse) else codec.encode
    best = {"d2h": float("inf"), "h2d": float("inf")}
    for _ in range(2):  # the first one compiles, and pins a lane
        encoded = [begin(x) for x in xs]
        out_s, parcels = timed(d2h, lambda e=encoded: [offloader.put(each) for each in e], asleep=True)
        encoded = []
        offloader.trim(0)
        stored = [parcel.stored() for parcel in parcels]
        back_s, _ = timed(h2d, lambda p=parcels: [parcel.prefetch() for parcel in reversed(p)], asleep=True)
        exact = all(torch.equal(codec.decode(p.get()), x) for p, x in zip(parcels, xs, strict=True))
        best = {"d2h": min(best["d2h"], out_s), "h2d": min(best["h2d"], back_s)}
        parcels = []
        if not exact:
            break
    wire_bytes = sum(codec.predicted_bytes(x.numel(), x.dtype, None if s is None else s / x.numel())
                     for x, s in zip(xs, stored, strict=True))  # fmt: skip
    rates = {way: wire_bytes / seconds / 1e9 for way, seconds in best.items()}
    return {
        "codec": codec.name, "size_mib": size_mib, "density": density, "count": count, "exact": exact,
        "wire_mib": wire_bytes / count / MIB, **{f"{way}_gbps": rate for way, rate in rates.items()},
        **{f"{way}_share": rate / link[f"{way}_gbps"] for way, rate in rates.items()},
        "raw_gbps": count * size_mib * MIB / best["d2h"] / 1e9,
    }  # fmt: skip


def rows(deadline: float) -> Iterator[dict[str, Any]]:
    """All rows, until the time is up."""
    backend = CudaBackend(torch.device("cuda"))
    head = {"time_utc": utc(), **environment("cuda")}
    link = link_row(backend)
    yield {"kind": "link", **head, **link}
    offloader = Offloader(backend, TOTAL_BYTES + LANE_BYTES + 256 * MIB, NO_BOUND, NO_BOUND, LANE_BYTES)
    cases: list[Callable[[], dict[str, Any]]] = [
        lambda: {"kind": "host", **driver_row(backend)},
        lambda: {"kind": "host", **torch_row(backend)},
        *[
            lambda row=row, name=name: {"kind": "host", **row(offloader, name)}
            for row in (host_row, calls_row)
            for name in ("dense", "zvc")
        ],
    ]
    for size_mib in reversed(SIZES_MIB):
        for density in (None, *DENSITIES):
            cases.append(lambda s=size_mib, d=density: {"kind": "wire", **wire_row(offloader, link, s, d)})
    for case in cases:
        if time.monotonic() > deadline:
            print("bench.offload: time is up", file=sys.stderr)
            return
        yield {**head, **case()}
    offloader.close()


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.offload", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--max-s", type=float, default=120.0, help="start no case after this many seconds")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.offload: needs a CUDA device", file=sys.stderr)
        return 2
    wrong = 0
    with open(args.out, "w", encoding="utf-8") as file:
        for row in rows(time.monotonic() + args.max_s):
            print(
                {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items() if k != "time_utc"}, flush=True
            )
            file.write(json.dumps(row) + "\n")
            file.flush()
            wrong += not row.get("exact", True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
