"""Seconds and workspace of cuDNN's engines for the convolutions whose workspace matters, where they can be run at all
(:mod:`gistkit.kernels.cudnn_convolutions`): what a plan may choose of beside PyTorch's own algorithm."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from gistkit.ir import SavedGraph, Task
from gistkit.kernels import ConvTask, conv_task, engines, engines_missing
from gistkit.nn.conv import Prepared
from gistkit.nn.standin import Geometry
from gistkit.planning.cost import Algorithm
from gistkit.profiling.memory_formats import WORTH_BYTES, padding_of

RUNS = 2
LIMIT_S = 20.0
"""For all engines of a step: those of the convolutions with most workspace are measured first."""
MOST_BYTES = 512 * 2**20
"""Of the largest map that an engine is measured on: fewer rows than the step's where it has more. VGG-16's second
convolution has 3,136 MiB with 256 images, which an engine without tensor cores may take seconds for."""
CLEARLY = 1.5
"""An engine that takes this many times what one with as little workspace takes, in one run, is not run again."""
_log = logging.getLogger("gistkit")


def engine_algorithms(
    graph: SavedGraph, own: Mapping[int, Algorithm], model: torch.nn.Module, rows: int, device: torch.device
) -> dict[int, tuple[Algorithm, ...]]:
    """By task of a covered convolution the engines that are faster than PyTorch's ``own`` algorithm or take less
    workspace, and of these none that another beats in both. A convolution counts where a task of it has much workspace.
    Each engine runs on random numbers, ``rows`` rows of them or those that fit into ``MOST_BYTES``; the seconds are
    those of the whole batch, and so is the workspace, which cuDNN says. What does not fit the card is left out, and,
    with a line in the log, what ``LIMIT_S`` is too short for. Nothing where engines cannot run."""
    if engines_missing():
        return {}
    where = _Where(max(graph.batch, 1), rows, device, time.perf_counter() + LIMIT_S)
    known: dict[tuple, list[Algorithm]] = {}
    found, late = {}, set[tuple]()
    tasks = [(task, _kind(graph, task, model)) for task in _heaviest(graph, own)]
    for task, kind in tasks:
        if kind not in known:
            known[kind] = _measured(task, own[task.index], where, *kind[-2:])
            late |= {kind} if where.over else set()
        best = [a for a in _unbeaten([own[task.index], *known[kind]]) if a.is_engine]
        if best:
            found[task.index] = tuple(best)
    if late:
        left = "%d tasks of convolutions are left with PyTorch's algorithm, or with some of the engines"
        count = sum(kind in late for _, kind in tasks)
        _log.warning(f"measuring cuDNN's engines took %g s; {left}", LIMIT_S, count)
    return found


class _Where(NamedTuple):
    """Rows of the whole batch, rows that are measured, on which device, and until when by the clock."""

    batch: int
    rows: int
    device: torch.device
    end_s: float

    @property
    def over(self) -> bool:
        return time.perf_counter() > self.end_s


def _kind(graph: SavedGraph, task: Task, model: torch.nn.Module) -> tuple:
    """What tasks have in common that take the same time; last whether they are channels_last, and have a bias."""
    has_bias = len(graph.calls[task.call].operands) > 2
    return task.conv, task.part_name, task.dtype, _is_channels_last(model, task.module), has_bias


def _heaviest(graph: SavedGraph, own: Mapping[int, Algorithm]) -> list[Task]:
    """The tasks of covered convolutions of which a task has much workspace, those with most of it first."""
    most: dict[int, int] = {}
    for index, algorithm in own.items():
        call = graph.tasks[index].call
        most[call] = max(most.get(call, 0), algorithm.workspace_bytes)
    tasks = [t for t in graph.tasks if t.index in own and most[t.call] >= WORTH_BYTES]
    return sorted((t for t in tasks if graph.calls[t.call].covered >= 0), key=lambda t: -most[t.call])


def _unbeaten(known: Iterable[Algorithm]) -> list[Algorithm]:
    """Of the fastest and of every other with less workspace than all faster ones."""
    best: list[Algorithm] = []
    for a in sorted(known, key=lambda a: (a.seconds, a.workspace_bytes)):
        if not best or a.workspace_bytes < best[-1].workspace_bytes:
            best.append(a)
    return best


def _measured(task: Task, own: Algorithm, where: _Where, channels_last: bool, bias: bool) -> list[Algorithm]:
    """Those engines that run, in the order of their workspace, until time is over."""
    if where.over:
        return []
    batch, rows, device, _ = where
    row = _task(task, 1, device, channels_last)
    rows = min(rows, max(1, MOST_BYTES // (row.dtype.itemsize * max(prod(row.x), prod(row.y)))))
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
        for name in sorted({e.name for e in engines(tried)} & whole.keys(), key=lambda name: (whole[name], name)):
            known = [a.seconds for a in (own, *found) if a.workspace_bytes <= whole[name]]
            limit_s = CLEARLY * min(known, default=float("inf")) * rows / batch
            run = _run_of(task, tried, name, operands, bias)
            if not where.over and (seconds := _seconds(run, device, limit_s)) is not None:
                found.append(Algorithm(name, seconds * batch / rows, whole[name]))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return found


def _run_of(task: Task, tried: ConvTask, name: str, operands: list[torch.Tensor], bias: bool) -> Callable[[], Any]:
    """What the runtime does in the task under that engine, the bias's part with it."""
    assert task.conv is not None
    where = Geometry(tried.stride, tried.padding, tried.dilation, task.conv.groups)
    call = Prepared(where, None, engines={tried.part: name}, channels_last=tried.channels_last)
    first, second = operands
    if tried.part == "forward":
        added = torch.zeros(tried.weight[0], dtype=tried.dtype, device=tried.device) if bias else None
        return lambda: call.forward(first, second, added)
    if tried.part == "weight":
        unread = torch.empty(tried.weight, device="meta")
        return lambda: call.weight_gradients(second, first, unread, (True, bias))
    return lambda: call.input_gradient(first, torch.Size(tried.x), second)


def _seconds(run: Callable[[], Any], device: torch.device, limit_s: float) -> float | None:
    """The least seconds of a few runs; None where the engine fails, its workspace does not fit, or already its second
    run takes longer than the limit."""
    try:
        run()  # builds
        taken = _timed(run, device)
        return None if taken > limit_s else min([taken, *(_timed(run, device) for _ in range(RUNS - 1))])
    except RuntimeError:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return None


def _timed(run: Callable[[], Any], device: torch.device) -> float:
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
