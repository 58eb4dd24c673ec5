"""Seconds of every task of one plain training step, measured where it runs (vDNN section III-C and moDNN section IV-A
profile likewise before they plan), on as many rows of the batch as fit the device.

The operators of a real step are timed one by one and put down to the forward call or backward node that runs them, as
the capture does on fake tensors; the tasks of both are then matched. On CUDA an operator is timed by a pair of events.
Where the device waits for the host an operator's launch is counted: tasks of tens of microseconds read too long.

Where the whole batch does not fit, half of its rows are taken, and so on; each task's time grows as the roofline says
(:func:`gistkit.ir.scale.scaled`). Out of memory counts as not fitting, and so does a cuDNN that finds no engine: on a
card without memory for a workspace it says that instead.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gistkit.capture import (
    Recorder,
    Span,
    StepBuilder,
    Tracer,
    capture,
    loss_of,
    no_autocast_cache,
    on_copy,
    others_untouched,
    own_positions,
    plain_copy,
    tensors_in,
    untouched_random_states,
)
from gistkit.errors import GistError, MeasureError, PlanMismatchError
from gistkit.ir import SavedGraph, Task, scaled
from gistkit.planning.cost import Algorithm, Hardware, StepTimes, cost_table, step_fingerprint
from gistkit.planning.policies import POLICIES
from gistkit.profiling.engines import engine_algorithms
from gistkit.profiling.host import HostTimes, task_s_of
from gistkit.profiling.memory_formats import channels_last_bytes
from gistkit.runtime import available_bytes, does_not_fit

_CONV_BACKWARD = torch.ops.aten.convolution_backward.default
_CONVS = (torch.ops.aten.convolution.default, _CONV_BACKWARD)
FEW_ROWS = 2
SLEEP_CYCLES = 400_000
"""Of the device before each operator, about 0.2 ms: the host needs 20 to 150 us to queue one."""


@dataclass(frozen=True)
class Work:
    """The inputs of one step: the model's arguments and the loss function's targets."""

    args: tuple
    kwargs: dict[str, Any]
    targets: tuple = ()
    loss_fn: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True)
class Measured:
    """One measured step: seconds by task, bytes that a convolution's task took beside its operands and results
    (on CUDA, by the allocator; else none), seconds of the whole step when nobody watched it."""

    seconds: dict[int, float]
    workspace_bytes: dict[int, int]
    step_s: float


def step_times(
    graph: SavedGraph, hardware: Hardware, model: torch.nn.Module, work: Work, *, engines: bool = True
) -> StepTimes:
    """The measured times of the graph's step, which ``capture(..., backward=True)`` made of ``model`` and ``work``.
    ``hardware`` is that of the device which model and arguments are on: what a step of fewer rows leaves open is scaled
    by its rates. ``engines``: also cuDNN's of convolutions with workspace, where there are any. Nothing of the model,
    its gradients and the random states changes, as a deep copy runs. Synchronises. Raises :class:`gistkit.MeasureError`
    where not even one row fits or a part of the batch does not run, PlanMismatchError where the step has not the
    graph's tasks, and what the step itself raises."""
    device, batch = device_name(model, work.args, work.kwargs), graph.batch
    parts = _first_parts(graph, hardware)
    while True:
        rows = -(-batch // parts)
        try:
            found = measured_step(graph, model, _first_rows(work, batch, rows))
            break
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if not does_not_fit(error):
                if parts == 1 or isinstance(error, GistError):
                    raise
                raise MeasureError(
                    f"measure: a plain step on all {batch} rows does not fit, and on the first {rows} of them it fails "
                    f"({text}); measure with a batch that fits, or plan without measured times"
                ) from error
            if rows <= 1:
                raise MeasureError(
                    f"measure: a plain step must fit {device} with one row of the batch at least, and does not ({text})"
                    "; free some of its memory, measure on a larger device and pass the file, or plan without measured "
                    "times"
                ) from error
        gc.collect()  # what the attempt held: its frames have ended, its cycles have not
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        parts = min(2 * parts, batch)
    seconds, workspace = _of_whole_batch(graph, hardware, parts, found), _workspace_bytes(graph, hardware, rows, found)
    other: dict[int, int] = {}
    known: dict[int, tuple[Algorithm, ...]] = {}
    if workspace:
        place = next(t.device for t in all_tensors(model, work.args))
        other = channels_last_bytes(graph, workspace, rows, place)
        if engines:
            own = {t: Algorithm("", seconds.get(t, 0.0), nbytes) for t, nbytes in workspace.items()}
            known = engine_algorithms(graph, own, model, rows, place)
    host = _host_task_s(graph, hardware, model, work)
    gc.collect()  # the compressed copy, which holds itself
    about = step_fingerprint(graph), device, batch, rows
    return StepTimes(*about, found.step_s, seconds, workspace, other, *host, engines=known)


def _host_task_s(graph: SavedGraph, hardware: Hardware, model: torch.nn.Module, work: Work) -> HostTimes:
    """The host's seconds for one task of a step of few rows, whose kernels take less time than that, plain and under
    the runtime; zeros on a CPU, and of a model that cannot take so few or that the runtime cannot run."""
    if not hardware.host_s:
        return HostTimes()
    with untouched_random_states(), torch.enable_grad(), no_autocast_cache():
        try:
            twin = plain_copy(model)
            few = _first_rows(replace(work, loss_fn=on_copy(work.loss_fn, model, twin)), graph.batch, FEW_ROWS)
            place = next(t.device for t in all_tensors(twin, few.args))
            part = capture(
                twin, few.args, few.kwargs, backward=True, loss_fn=work.loss_fn and few.loss_fn, targets=few.targets
            )
            return task_s_of(twin, part, partial(_unwatched, twin, few), place)
        except (GistError, RuntimeError, ValueError):
            return HostTimes()


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
    def cut(item: Any) -> Any:
        has_rows = isinstance(item, torch.Tensor) and item.dim() > 0 and item.shape[0] == batch
        return item[:rows] if has_rows and rows < batch else item

    args, kwargs, targets = tree_map(cut, (work.args, work.kwargs, work.targets))
    return Work(args, kwargs, targets, work.loss_fn)


def _of_whole_batch(graph: SavedGraph, hardware: Hardware, parts: int, found: Measured) -> dict[int, float]:
    seconds = {task: taken for task, taken in found.seconds.items() if taken > 0}
    if parts == 1:
        return seconds
    whole, part = (cost_table(g, hardware) for g in (graph, scaled(graph, parts)))
    ratio = {t: whole.task_s(t) / part.task_s(t) if part.task_s(t) else 1.0 for t in seconds}
    return {t: taken * ratio[t] for t, taken in seconds.items()}


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
    flat = ([*i.parameters(), *i.buffers()] if isinstance(i, torch.nn.Module) else tensors_in(i) for i in items)
    return [t for tensors in flat for t in tensors]


def measured_step(graph: SavedGraph, model: torch.nn.Module, work: Work, *, repeats: int = 3) -> Measured:
    """The seconds of every task of ``graph``, which ``capture(..., backward=True)`` made of this model, with the
    workspace of convolutions and the seconds of the whole step. Runs ``repeats`` steps after two that nobody watches,
    of which the faster one counts, on a deep copy of the model in plain PyTorch; each task's least time counts. A
    convolution's two gradients are taken one after the other, as the runtime takes them; a linear's two tasks get half
    of its backward's time each. Tasks of no call that this step does not have are left out. Synchronises; on CUDA the
    allocator's peak statistics begin anew."""
    best: dict[int, float] = {}
    workspace_bytes: dict[int, int] = {}
    with untouched_random_states(), torch.enable_grad(), no_autocast_cache():
        twin = plain_copy(model)
        work = replace(work, loss_fn=on_copy(work.loss_fn, model, twin))
        whole_s = min(_unwatched(twin, work) for _ in range(2))
        for _ in range(repeats):
            twin.zero_grad(set_to_none=True)
            taken, workspace_bytes = _one_step(graph, twin, work)
            best = {task: min(seconds, best.get(task, seconds)) for task, seconds in taken.items()}
    return Measured(best, workspace_bytes, whole_s)


def _unwatched(model: torch.nn.Module, work: Work) -> float:
    model.zero_grad(set_to_none=True)
    cards = {t.device for t in all_tensors(model, work.args, work.kwargs) if t.device.type == "cuda"}

    def now() -> float:
        for card in cards:
            torch.cuda.synchronize(card)
        return time.perf_counter()

    start = now()
    loss = loss_of(model(*work.args, **work.kwargs), work.targets, work.loss_fn)
    with others_untouched(loss, model.parameters()), torch.autograd.set_multithreading_enabled(False):
        loss.backward()  # as gistkit.step
    return now() - start


class _Timer(Tracer):
    """A tracer of a real step that notes when every operator began and ended, by span and by part of it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.timings: list[tuple[tuple[int, str], Any, Any]] = []
        self.workspace_bytes: dict[tuple[int, str], int] = {}

    def run(self, span: Span, func: Any, args: tuple, kwargs: dict) -> Any:
        if func.is_view:  # nothing runs; most are the recorder's own
            return func(*args, **kwargs)
        if func is not _CONV_BACKWARD or kwargs:
            return self._timed((id(span), ""), func, args, kwargs)
        *given, mask = args
        if not mask[0] or not any(mask[1:]):
            return self._timed((id(span), "input" if mask[0] else "weight"), func, args, kwargs)
        _, weight, bias = self._timed((id(span), "weight"), func, (*given, [False, *mask[1:]]), kwargs)
        return self._timed((id(span), "input"), func, (*given, [True, False, False]), kwargs)[0], weight, bias

    def _timed(self, key: tuple[int, str], func: Any, args: tuple, kwargs: dict) -> Any:
        cards = (t.device for t in tensors_in((args, kwargs)) if t.device.type == "cuda")
        device = next(cards, torch.device(kwargs.get("device") or "cpu"))
        if device.type != "cuda":
            start = time.perf_counter()
            out = func(*args, **kwargs)
            self.timings.append((key, start, time.perf_counter()))
            return out
        if func in _CONVS:
            torch.cuda.reset_peak_memory_stats(device)
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record(stream)
            out = func(*args, **kwargs)
            end.record(stream)
        self.timings.append((key, begin, end))
        if func in _CONVS:
            passing_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
            self.workspace_bytes[key] = max(passing_bytes, self.workspace_bytes.get(key, 0))
        return out

    def seconds(self) -> dict[tuple[int, str], float]:
        """Seconds by ``id`` of the span and part of it. Waits for the device."""
        total: dict[tuple[int, str], float] = defaultdict(float)
        for key, begin, end in self.timings:
            if isinstance(begin, float):
                total[key] += end - begin
            else:
                end.synchronize()
                total[key] += begin.elapsed_time(end) / 1e3
        return total


def _one_step(graph: SavedGraph, model: torch.nn.Module, work: Work) -> tuple[dict[int, float], dict[int, int]]:
    # "fake": a recording that calls itself real counts the zeros of all that is saved, which nobody asked for here.
    recorder = Recorder(model, source="fake")
    timer, notes = _Timer(recorder), recorder.notes
    timer.outside([*model.parameters(), *model.buffers()])
    with timer:
        with recorder, own_positions((work.args, work.kwargs)):
            out = model(*work.args, **work.kwargs)
        timer.active = False
        forward = recorder.finish(out)
        timer.active, timer.phase = True, "loss"
        loss = loss_of(out, work.targets, work.loss_fn)
        del out
        timer.phase = "backward"
        with others_untouched(loss, model.parameters()):
            loss.backward()
            timer.finish()
    taken, space = timer.seconds(), timer.workspace_bytes
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    shares = _matched(graph, StepBuilder(forward, notes, timer, gradients).tasks_with_spans())
    seconds = {task: sum(taken.get(key, 0.0) * share for key, share in parts) for task, parts in shares.items()}
    workspace = {task: max(space.get(key, 0) for key, _ in parts) for task, parts in shares.items()}
    return seconds, {task: nbytes for task, nbytes in workspace.items() if nbytes}


Parts = list[tuple[tuple[int, str], float]]
"""The ``id`` of a span and a part of it, each with the share of it that is a task's."""


def _matched(graph: SavedGraph, ran: list[tuple[Task, Span]]) -> dict[int, Parts]:
    """What a task of the graph is of the spans; what ran beside tasks (a gradient copied to ``.grad``) is left out."""
    shares = Counter(id(span) for _, span in ran)
    key = attrgetter("phase", "op", "call", "part")
    found: dict[tuple, deque[Parts]] = defaultdict(deque)
    for task, span in ran:
        whole = {"": 1.0, "weight": 1.0, "input": 1.0}
        parts = whole if shares[id(span)] == 1 else {"": 1 / shares[id(span)], task.part: 1.0}
        found[key(task)].append([((id(span), part), share) for part, share in parts.items()])
    matched = {}
    for task in graph.tasks:
        if found[key(task)]:
            matched[task.index] = found[key(task)].popleft()
        elif task.call >= 0:
            what = " ".join(filter(None, (task.phase, task.op, task.part)))
            raise PlanMismatchError(
                f"the task {task.index}, {what} of {task.module or 'the model'}",
                "a step without it",
                "measure the model, batch and loss that the graph was captured from",
            )
    return matched
