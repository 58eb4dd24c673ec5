"""Seconds and workspace of cuDNN's engines for the convolutions whose workspace matters, where they can be run at all
(:mod:`gistkit.kernels.cudnn_convolutions`): what a plan may choose of beside PyTorch's own algorithm."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from gistkit.ir import SavedGraph, Task
from gistkit.kernels import ConvTask, EnginePlan, conv_task, engines, engines_missing, run_engine_plan
from gistkit.planning.cost import Algorithm
from gistkit.profiling.memory_formats import WORTH_BYTES, padding_of

RUNS = 2
MOST_TIMES = 20
"""An engine that takes so many times as long as PyTorch's algorithm is in no plan (a GEMM of one thread block)."""


def engine_algorithms(
    graph: SavedGraph, own: Mapping[int, Algorithm], model: torch.nn.Module, rows: int, device: torch.device
) -> dict[int, tuple[Algorithm, ...]]:
    """By task of a covered convolution the engines that are faster than PyTorch's ``own`` algorithm or take less
    workspace, and of these none that another beats in both. A convolution counts where a task of it has much workspace.
    Each engine runs on ``rows`` rows of random numbers; the seconds are those of the whole batch, and so is the
    workspace, which cuDNN says. What does not fit the card is left out. Nothing where engines cannot run."""
    if engines_missing():
        return {}
    heavy = {graph.tasks[t].call for t, a in own.items() if a.workspace_bytes >= WORTH_BYTES}
    known: dict[tuple, list[Algorithm]] = {}
    found = {}
    for task in graph.tasks:
        call = task.call if task.call in heavy and task.index in own else -1
        if call < 0 or graph.calls[call].covered < 0:
            continue
        channels_last = _is_channels_last(model, task.module)
        key = task.conv, task.part_name, task.dtype, channels_last
        if key not in known:
            known[key] = _measured(task, max(graph.batch, 1), rows, device, channels_last, own[task.index].seconds)
        best = [a for a in _unbeaten([own[task.index], *known[key]]) if a.is_engine]
        if best:
            found[task.index] = tuple(best)
    return found


def _unbeaten(known: Iterable[Algorithm]) -> list[Algorithm]:
    """Of the fastest and of every other with less workspace than all faster ones."""
    best: list[Algorithm] = []
    for a in sorted(known, key=lambda a: (a.seconds, a.workspace_bytes)):
        if not best or a.workspace_bytes < best[-1].workspace_bytes:
            best.append(a)
    return best


def _measured(
    task: Task, batch: int, rows: int, device: torch.device, channels_last: bool, own_s: float
) -> list[Algorithm]:
    tried = _task(task, rows, device, channels_last)
    whole = {e.name: e.workspace_bytes for e in engines(_task(task, batch, device, channels_last))}
    found, numbers = [], torch.Generator(device).manual_seed(0)  # nobody else's random state
    try:
        operands = [
            torch.randn(shape, dtype=tried.dtype, device=device, generator=numbers).contiguous(
                memory_format=tried.memory_format
            )
            for shape in tried.shapes[:2]
        ]
        for engine in engines(tried):
            if engine.name in whole and (seconds := _seconds(tried, engine, operands)) is not None:
                found.append(Algorithm(engine.name, seconds * batch / rows, whole[engine.name]))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return [a for a in found if a.seconds <= MOST_TIMES * own_s]


def _seconds(task: ConvTask, engine: EnginePlan, operands: list[torch.Tensor]) -> float | None:
    """The least seconds of a few runs; None where the engine fails or its workspace does not fit."""
    run = partial(run_engine_plan, task, engine.name, *operands)
    taken = []
    try:
        for _ in range(1 + RUNS):  # the first one builds
            taken.append(_timed(run, task.device))
    except RuntimeError:
        if task.device.type == "cuda":
            torch.cuda.empty_cache()
        return None
    return min(taken[1:])


def _timed(run: partial[torch.Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _task(task: Task, rows: int, device: torch.device, channels_last: bool) -> ConvTask:
    conv = task.conv
    assert conv is not None
    x, weight = (rows, conv.c, conv.h, conv.w), (conv.k, conv.c // conv.groups, *conv.kernel)
    options = conv.stride, padding_of(conv), conv.dilation
    return conv_task(task.part_name, x, weight, options, getattr(torch, task.dtype), device, channels_last)


def _is_channels_last(model: torch.nn.Module, module: str) -> bool:
    """Whether the weight of a convolution is, as which PyTorch then runs it."""
    weight = getattr(model.get_submodule(module), "weight", None) if module else None
    if not isinstance(weight, torch.Tensor) or weight.dim() != 4:
        return False
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
