"""cuDNN's engines for convolutions, a row each, PyTorch's own first: python -m bench.algorithms --out ROWS.jsonl

Of VGG-16's convolutions conv1_2, conv2_2 and conv4_2 (or --layers), by batch, precision, memory format and task: name,
workspace, milliseconds (median), and whether the result is PyTorch's bit for bit, else the largest difference as a
share of PyTorch's largest value. ``used_mib`` is what the allocator gave beside the result. Needs a CUDA device and the
extra ``cudnn``. Exit status 1 where a plan failed; its message is in its row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.rows import environment, utc
from gistkit.kernels import ConvTask, conv_task, engines, engines_missing, run_engine_plan

LAYERS = {"conv1_2": (64, 64, 224), "conv2_2": (128, 128, 112), "conv4_2": (512, 512, 28)}
"""Input and output channels, side; 3x3 with padding 1."""
PRECISIONS = {"fp32": (torch.float32, False), "tf32": (torch.float32, True), "bf16": (torch.bfloat16, True)}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
OPTIONS = ((1, 1), (1, 1), (1, 1))
MOST_S = 0.5
"""A plan that takes longer is timed by one run."""


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench.algorithms", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    if missing := engines_missing():
        parser.error(missing)
    failed = 0
    with open(args.out, "w", encoding="utf-8") as file:
        for layer, batch, precision, layout in (
            (layer, batch, p, layout)
            for layer in args.layers
            for batch in args.batches
            for p in args.precisions
            for layout in args.formats
        ):
            about = {"layer": layer, "batch": batch, "precision": precision, "format": layout}
            for row in _rows(layer, batch, precision, layout, args.runs):
                row = {"kind": "algorithm", "time_utc": utc(), **environment("cuda"), **about, **row}
                file.write(json.dumps(row) + "\n")
                file.flush()
                failed += "error" in row
                print(layer, batch, precision, layout, row["part"], _figures(row), flush=True)
    return 1 if failed else 0


def _rows(layer: str, batch: int, precision: str, layout: str, runs: int) -> Iterator[dict[str, Any]]:
    (c, k, side), (dtype, tf32) = LAYERS[layer], PRECISIONS[precision]
    torch.manual_seed(0)
    made = {"dtype": dtype, "device": "cuda"}
    x, dy = (
        torch.randn(batch, n, side, side, **made).contiguous(memory_format=FORMATS[layout])  # type: ignore[arg-type]
        for n in (c, k)
    )
    weight = torch.randn(k, c, 3, 3, **made).contiguous(memory_format=FORMATS[layout])  # type: ignore[arg-type]
    operands = {"forward": (x, weight), "weight": (x, dy), "input": (dy, weight)}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        for part, (first, second) in operands.items():
            task = conv_task(part, x.shape, weight.shape, OPTIONS, dtype, x.device, layout == "channels_last")
            own = pytorchs(task, x, weight, dy)
            expected, row = _measured(own, runs)
            yield {"part": part, "name": "pytorch", **row}
            for plan in engines(task):
                told = {"part": part, "name": plan.name, "workspace_mib": plan.workspace_bytes / 2**20}
                try:
                    result, row = _measured(partial(run_engine_plan, task, plan.name, first, second), runs)
                except RuntimeError as error:
                    yield {**told, "error": f"{type(error).__name__}: {error}"}
                    torch.cuda.empty_cache()
                    continue
                yield {**told, **row, **_compared(result, expected)}
                del result
            del expected


def pytorchs(
    task: ConvTask, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, groups: int = 1
) -> Callable[[], torch.Tensor]:
    """PyTorch's own run of the task."""
    options = list(task.stride), list(task.padding), list(task.dilation), False, [0, 0], groups
    if task.part == "forward":
        return lambda: torch.ops.aten.convolution(x, weight, None, *options)
    mask, at = [task.part == "input", task.part == "weight", False], 0 if task.part == "input" else 1
    return lambda: torch.ops.aten.convolution_backward(dy, x, weight, None, *options, mask)[at]


def _measured(run: Callable[[], torch.Tensor], runs: int) -> tuple[torch.Tensor, dict[str, float]]:
    """The result of a run, and its figures; the first run, which builds, is not timed."""
    result = run()
    torch.cuda.synchronize()
    del result
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result, seconds = None, []
    for _ in range(runs):
        del result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
        if seconds[-1] > MOST_S:
            break
    assert result is not None
    used = torch.cuda.max_memory_allocated() - before - result.untyped_storage().nbytes()
    return result, {"ms": 1e3 * sorted(seconds)[len(seconds) // 2], "used_mib": used / 2**20}


def _compared(result: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    if torch.equal(result, expected):
        return {"equal": True}
    # a part at a time: the difference of two maps of 3 GiB is another
    pairs = zip(result.split(16), expected.split(16), strict=True)
    worst = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    return {"equal": False, "error_of_largest": worst / max(expected.abs().max().item(), 1e-30)}


def _figures(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']} FAILED: {row['error']}"
    bits = "" if "equal" not in row else ", equal" if row["equal"] else f", off by {row['error_of_largest']:.1e}"
    stated = row.get("workspace_mib", row["used_mib"])
    return f"{row['name']}: {stated:,.1f} MiB (used {row['used_mib']:,.1f}), {row['ms']:.3f} ms{bits}"


if __name__ == "__main__":
    sys.exit(main())
