"""What a convolution's workspace would be in channels_last: cuDNN copies contiguous maps into that layout for some of
its algorithms (VGG-16's second convolution, 256 images in TF32: two maps of 3,136 MiB, docs/log.md)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gistkit.ir import ConvShape, SavedGraph, Task

WORTH_BYTES = 64 * 2**20
"""Workspace below this sets no peak that anybody plans for."""


def channels_last_bytes(
    graph: SavedGraph, workspace_bytes: Mapping[int, int], rows: int, device: torch.device
) -> dict[int, int]:
    """By task, the workspace in channels_last where that is less than the measured one: each such convolution runs once
    on ``rows`` rows of anything, and the bytes grow with the rows. One that does not fit the card is left out."""
    found: dict[int, int] = {}
    known: dict[tuple, int] = {}
    for task in graph.tasks:
        taken = workspace_bytes.get(task.index, 0)
        if task.conv is None or taken < WORTH_BYTES:
            continue
        kind = task.conv, task.phase, task.part, task.dtype
        if kind not in known:
            try:
                known[kind] = _workspace(task, task.conv, rows, device)
            except RuntimeError:  # out of memory, or no algorithm for it
                torch.cuda.empty_cache()
                known[kind] = taken
        nbytes = -(-known[kind] * max(graph.batch, 1) // max(rows, 1))
        if nbytes < taken:
            found[task.index] = nbytes
    return found


def padding_of(conv: ConvShape) -> tuple[int, int]:
    """The least at one side's ends with which the convolution gives its result."""
    sides = zip((conv.h, conv.w), (conv.out_h, conv.out_w), conv.kernel, conv.stride, conv.dilation, strict=True)
    high, wide = (max(0, -(-((out - 1) * step + apart * (k - 1) + 1 - n) // 2)) for n, out, k, step, apart in sides)
    return high, wide


def _workspace(task: Task, conv: ConvShape, rows: int, device: torch.device) -> int:
    def made(*shape: int) -> torch.Tensor:
        dtype = getattr(torch, task.dtype)
        return torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)

    x, weight = made(rows, conv.c, conv.h, conv.w), made(conv.k, conv.c // conv.groups, *conv.kernel)
    y = made(rows, conv.k, conv.out_h, conv.out_w)
    options = list(conv.stride), list(padding_of(conv)), list(conv.dilation), False, [0, 0], conv.groups
    torch.cuda.reset_peak_memory_stats(device)
    if task.phase == "forward":
        del y
        y = torch.ops.aten.convolution(x, weight, None, *options)
        results = (y,)
    else:
        mask = [task.part != "weight", task.part != "input", False]
        results = torch.ops.aten.convolution_backward(y, x, weight, None, *options, mask)
    passing_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del results  # not before: what it makes is no workspace
    return passing_bytes
