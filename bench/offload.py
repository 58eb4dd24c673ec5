"""What the offloader gets out of the link, on the CUDA device at hand.

    python -m bench.offload --out bench/results/NAME.jsonl [--max-s 120]

Rows of kind ``link``: a pinned copy of 512 MiB each way alone and both at once, the ceiling. Rows of kind ``offload``:
tensors of one size and density, dense and as ``zvc``, encoded beforehand, put one after the other and fetched again in
stack order. ``d2h_gbps`` and ``h2d_gbps`` are bytes on the wire a second, ``raw_gbps`` the tensors' own bytes by the
time of the way out; ``put_us``, ``prefetch_us`` and ``get_us`` the host's time a parcel, the device asleep meanwhile.
What came back is compared bit for bit. Exit status 1 where a bit differs, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gistkit.benchmark.measure import environment, utc
from gistkit.codecs import CODECS, Encoded
from gistkit.runtime.offload.backends import CudaBackend
from gistkit.runtime.offload.offloader import Offloader
from gistkit.runtime.offload.parcel import Parcel

MIB = 2**20
LINK_BYTES, TOTAL_BYTES = 512 * MIB, 1024 * MIB
SIZES_MIB = (4, 16, 64, 256)
DENSITIES = (0.1, 0.3, 0.5, 0.7, 0.9)
SLEEP_CYCLES = 400_000_000
NO_BOUND = 2**62


def timed(stream: torch.cuda.Stream, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds on the device from the first to the last work of a stream, with nothing else on it before."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    made = work()
    end.record(stream)
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, made


def link_row(backend: CudaBackend) -> dict[str, float]:
    """The ceiling each way, alone and together, in GB/s."""
    here = [torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    there = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def out() -> None:
        with torch.cuda.stream(backend.d2h):
            there[0].copy_(here[0], non_blocking=True)

    def back() -> None:
        with torch.cuda.stream(backend.h2d):
            here[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        out()
        back()
        backend.d2h.wait_stream(backend.h2d)

    found = {}
    for name, stream, work, times in (("d2h", backend.d2h, out, 1), ("h2d", backend.h2d, back, 1),
                                      ("both", backend.d2h, both, 2)):  # fmt: skip
        work()
        found[f"{name}_gbps"] = times * LINK_BYTES / min(timed(stream, work)[0] for _ in range(3)) / 1e9
    return found


def host_us(count: int, work: Callable[[], Any]) -> float:
    """Microseconds of the host for one of ``count``, while the device sleeps."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start = time.perf_counter()
    work()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / count * 1e6


def offload_row(backend: CudaBackend, size_mib: int, density: float | None) -> dict[str, Any]:
    """One size, dense or as zvc at a density."""
    count = max(2, min(32, TOTAL_BYTES // (size_mib * MIB)))
    xs = [torch.relu(torch.randn(size_mib * MIB // 4, device="cuda")) for _ in range(count)]
    if density is not None:
        for x in xs:
            x.copy_(torch.where(torch.rand_like(x) < density, x.abs() + 1, 0))
    name = "dense" if density is None else "zvc"
    codec, lane_bytes = CODECS[name], 0 if density is None else int(1.3 * count * size_mib * MIB)
    offloader = Offloader(backend, int(2.2 * count * size_mib * MIB), NO_BOUND, NO_BOUND, lane_bytes)

    def put() -> list[Parcel]:
        made: list[Encoded] = [codec.encode(x) for x in xs]
        torch.cuda.synchronize()
        return [offloader.put(encoded) for encoded in made]

    def fetch(parcels: list[Parcel]) -> list[Encoded]:
        for parcel in reversed(parcels):
            parcel.prefetch()
        return [parcel.get() for parcel in parcels]

    fetch(put())
    encoded = [codec.encode(x) for x in xs]
    out_s, parcels = timed(backend.d2h, lambda: [offloader.put(e) for e in encoded])
    encoded = []
    offloader.trim(0)
    stored = [parcel.stored() for parcel in parcels]
    wire_bytes = sum(codec.predicted_bytes(x.numel(), x.dtype, None if s is None else s / x.numel())
                     for x, s in zip(xs, stored, strict=True))  # fmt: skip
    back_s, _ = timed(backend.h2d, lambda: [parcel.prefetch() for parcel in reversed(parcels)])
    exact = all(torch.equal(codec.decode(p.get()), x) for p, x in zip(parcels, xs, strict=True))
    parcels = []
    encoded = [codec.encode(x) for x in xs]
    put_us = host_us(count, lambda: parcels.extend(offloader.put(e) for e in encoded))
    encoded = []
    offloader.trim(0)
    prefetch_us = host_us(count, lambda: [parcel.prefetch() for parcel in reversed(parcels)])
    get_us = host_us(count, lambda: [parcel.get() for parcel in parcels])
    parcels = []
    offloader.close()
    return {
        "codec": name, "size_mib": size_mib, "density": density, "count": count, "exact": exact,
        "d2h_gbps": wire_bytes / out_s / 1e9, "h2d_gbps": wire_bytes / back_s / 1e9,
        "raw_gbps": count * size_mib * MIB / out_s / 1e9,
        "put_us": put_us, "prefetch_us": prefetch_us, "get_us": get_us,
    }  # fmt: skip


def rows(deadline: float) -> Iterator[dict[str, Any]]:
    """All rows, until the time is up."""
    backend = CudaBackend(torch.device("cuda"))
    head = {"time_utc": utc(), **environment("cuda")}
    yield {"kind": "link", **head, **link_row(backend)}
    for density in (None, *DENSITIES):
        for size_mib in SIZES_MIB:
            if time.monotonic() > deadline:
                print("bench.offload: time is up", file=sys.stderr)
                return
            yield {"kind": "offload", **head, **offload_row(backend, size_mib, density)}


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
