"""The seconds of every task of a step, measured on as many rows of the batch as fit the device.

Who plans for a budget often has a step that plain PyTorch cannot run. So where the whole batch does not fit, half of
its rows are taken, and so on; each task's time grows as the roofline says (:func:`gistkit.ir.scale.scaled`: work and
traffic of activations in proportion, those of parameters not at all). Out of memory counts as not fitting, and so does
a cuDNN that finds no engine: on a card without memory for a workspace it says that instead.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gistkit.capture import tensors_in
from gistkit.errors import GistError, MeasureError
from gistkit.ir import SavedGraph, scaled
from gistkit.planning.cost import Hardware, StepTimes, cost_table, step_fingerprint
from gistkit.planning.policies import POLICIES
from gistkit.profiling.measure import Measured, Work, measured_step
from gistkit.runtime import available_bytes, does_not_fit


def step_times(
    graph: SavedGraph, hardware: Hardware, model: torch.nn.Module, work: Work, *, repeats: int = 3
) -> StepTimes:
    """The measured times of the graph's step, which ``capture(..., backward=True)`` made of ``model`` and ``work``.

    ``hardware`` is that of the device which model and arguments are on: what a step of fewer rows leaves open is
    scaled by its rates. Nothing of the model, its gradients and the random states changes, as a deep copy runs.
    Synchronises. Raises :class:`gistkit.MeasureError` where not even one row fits or a part of the batch does not run,
    PlanMismatchError where the step has not the graph's tasks, and what the step itself raises.
    """
    parts = _first_parts(graph, hardware)
    while True:
        rows = -(-graph.batch // parts)
        try:
            part = _first_rows(work, graph.batch, rows)
            found = measured_step(graph, model, part, repeats=repeats)
            break
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if not does_not_fit(error):
                if parts == 1 or isinstance(error, GistError):
                    raise
                raise MeasureError(_cannot_run(graph.batch, rows, text)) from error
            if rows <= 1:
                raise MeasureError(_never_fits(device_name(model, work.args, work.kwargs), text)) from error
        _let_go()
        parts = min(2 * parts, graph.batch)
    return StepTimes(
        fingerprint=step_fingerprint(graph),
        device=device_name(model, work.args, work.kwargs),
        batch=graph.batch,
        rows=rows,
        step_s=found.step_s,
        seconds=_of_whole_batch(graph, hardware, parts, found),
        workspace_bytes=_workspace_bytes(graph, hardware, rows, found),
    )


def _workspace_bytes(graph: SavedGraph, hardware: Hardware, rows: int, found: Measured) -> dict[int, int]:
    """Workspace of every convolution's tasks on the whole batch: it grows with the rows, as most of it are copies of
    the maps. Nothing on a CPU, or where cuDNN does not run."""
    if not (hardware.async_counts and torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled):
        return {}
    convs = (t.index for t in graph.tasks if t.conv is not None and found.seconds.get(t.index, 0) > 0)
    return {t: -(-found.workspace_bytes.get(t, 0) * max(graph.batch, 1) // max(rows, 1)) for t in convs}


def device_name(*items: Any) -> str:
    """``cpu``, or the name of the CUDA card that the first tensor of some models and nested items is on."""
    device = next((t.device for t in all_tensors(*items)), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def all_tensors(*items: Any) -> list[torch.Tensor]:
    """All tensors of some models (parameters and buffers) and nested items."""
    found: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.nn.Module):
            found += [*item.parameters(), *item.buffers()]
        else:
            found += tensors_in(item)
    return found


def _first_parts(graph: SavedGraph, hardware: Hardware) -> int:
    """In how many parts to try first. A CUDA device refuses by itself what does not fit; a host swaps, or ends the
    process: there plain PyTorch's predicted peak decides."""
    if hardware.async_counts:
        return 1
    free_bytes, parts = available_bytes(), 1
    while free_bytes and 2 * parts <= graph.batch:
        part = scaled(graph, parts)
        if POLICIES["plain"](part, cost_table(part, hardware)).peak_bytes <= free_bytes:
            break
        parts *= 2
    return parts


def _first_rows(work: Work, batch: int, rows: int) -> Work:
    """The work on the first rows: of every tensor that has the batch's rows."""
    if rows == batch:
        return work

    def cut(item: Any) -> Any:
        has_rows = isinstance(item, torch.Tensor) and item.dim() > 0 and item.shape[0] == batch
        return item[:rows] if has_rows else item

    args, kwargs, targets = (tree_map(cut, item) for item in (work.args, work.kwargs, work.targets))
    return Work(args, kwargs, targets, work.loss_fn)


def _of_whole_batch(graph: SavedGraph, hardware: Hardware, parts: int, found: Measured) -> dict[int, float]:
    seconds = {task: taken for task, taken in found.seconds.items() if taken > 0}
    if parts == 1:
        return seconds
    whole, part = (cost_table(g, hardware) for g in (graph, scaled(graph, parts)))
    ratio = {t: whole.task_s(t) / part.task_s(t) if part.task_s(t) else 1.0 for t in seconds}
    return {t: taken * ratio[t] for t, taken in seconds.items()}


def _let_go() -> None:
    """What the attempt held: its frames have ended, its cycles have not."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _cannot_run(batch: int, rows: int, text: str) -> str:
    return (
        f"measure: a plain step on all {batch} rows does not fit, and on the first {rows} of them it fails ({text}); "
        "measure with a batch that fits, or plan without measured times"
    )


def _never_fits(device: str, text: str) -> str:
    return (
        f"measure: a plain step must fit {device} with one row of the batch at least, and does not ({text}); free some "
        "of its memory, measure on a larger device and pass the file, or plan without measured times"
    )
