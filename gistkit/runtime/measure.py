"""Seconds of every task of one plain training step, measured where it runs (vDNN section III-C and moDNN section IV-A
profile likewise before they plan).

The operators of a real step are timed one by one and put down to the forward call or backward node that runs them, as
the capture does on fake tensors; the tasks of both are then matched. On CUDA an operator is timed by a pair of events
around it. The host's own time for the watching lies between operators and is not counted; but where the device waits
for the host, an operator's launch is: tasks of a few tens of microseconds read too long.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gistkit.errors import PlanMismatchError
from gistkit.graph.recorder import Recorder
from gistkit.graph.saved import SavedGraph
from gistkit.graph.step import tasks_with_spans
from gistkit.graph.tasks import Task
from gistkit.graph.trace import Span, Tracer
from gistkit.graph.traced import loss_of
from gistkit.runtime.attach import compressed_forward, restore

Timing = tuple[Span, Any, Any]


def measured_tasks(
    graph: SavedGraph,
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    *,
    targets: tuple = (),
    loss_fn: Callable[..., torch.Tensor] | None = None,
    repeats: int = 3,
) -> dict[int, float]:
    """{task: seconds} of ``graph``, which ``capture(..., backward=True)`` made of this model, for ``cost_table``.

    Runs ``repeats`` steps after one to warm up, on a deep copy of the model in plain PyTorch, on the device that model
    and arguments are on; each task's least time counts. Model, gradients and random states stay as they are. A
    convolution's or linear's backward is one operator to PyTorch: its two tasks get half of the time each. Tasks of no
    call that this step does not have are left out. Synchronises.

    Raises ValueError for ``repeats`` below 1 or a graph without tasks, PlanMismatchError where the step has not the
    graph's tasks.
    """
    if repeats < 1:
        raise ValueError(f"measured_tasks: repeats must be at least 1, got {repeats}; give 3")
    if not graph.tasks:
        raise ValueError("measured_tasks: graph must have tasks, got none; capture the model with backward=True")
    twin = copy.deepcopy(model)
    if compressed_forward(twin) is not None:
        restore(twin)
    best: dict[int, float] = {}
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        for turn in range(repeats + 1):
            twin.zero_grad(set_to_none=True)
            taken = _one_step(graph, twin, args, kwargs or {}, targets, loss_fn)
            if turn:
                best = {task: min(seconds, best.get(task, seconds)) for task, seconds in taken.items()}
    return best


class _Timer(Tracer):
    """A tracer of a real step that notes when every operator began and ended."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.timings: list[Timing] = []

    def run(self, span: Span, func: Any, args: tuple, kwargs: dict) -> Any:
        if func.is_view:  # nothing runs; most are the recorder's own
            return func(*args, **kwargs)
        device = next((t.device for t in args if isinstance(t, torch.Tensor) and t.device.type == "cuda"), None)
        if device is None:
            start = time.perf_counter()
            out = func(*args, **kwargs)
            self.timings.append((span, start, time.perf_counter()))
            return out
        stream = torch.cuda.current_stream(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        out = func(*args, **kwargs)
        end.record(stream)
        self.timings.append((span, begin, end))
        return out

    def seconds(self) -> dict[int, float]:
        """Seconds by ``id`` of the span. Waits for the devices."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        total: dict[int, float] = defaultdict(float)
        for span, begin, end in self.timings:
            total[id(span)] += end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
        return total


def _one_step(
    graph: SavedGraph, model: torch.nn.Module, args: tuple, kwargs: Mapping, targets: tuple, loss_fn: Callable | None
) -> dict[int, float]:
    # "fake": a recording that calls itself real counts the zeros of all that is saved, which nobody asked for here.
    recorder = Recorder(model, source="fake")
    timer, notes = _Timer(recorder), recorder.notes
    timer.outside([*model.parameters(), *model.buffers()])
    with timer:
        with recorder:
            out = model(*args, **kwargs)
        timer.active = False
        forward = recorder.finish(out)
        timer.active, timer.phase = True, "loss"
        loss = loss_of(out, targets, loss_fn)
        del out
        timer.phase = "backward"
        loss.backward()
        timer.finish()
    taken = timer.seconds()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return _matched(graph, tasks_with_spans(forward, notes, timer, gradients), taken)


def _matched(graph: SavedGraph, ran: list[tuple[Task, Span]], taken: Mapping[int, float]) -> dict[int, float]:
    """Seconds by task of the graph; what ran beside its tasks (a gradient copied on its way to ``.grad``) is left
    out."""
    shares: dict[int, int] = defaultdict(int)
    for _, span in ran:
        shares[id(span)] += 1
    found: dict[tuple, deque[float]] = defaultdict(deque)
    for task, span in ran:
        found[_key(task)].append(taken[id(span)] / shares[id(span)])
    seconds = {}
    for task in graph.tasks:
        if found[_key(task)]:
            seconds[task.index] = found[_key(task)].popleft()
        elif task.call >= 0:
            what = " ".join(filter(None, (task.phase, task.op, task.part)))
            raise PlanMismatchError(
                f"the task {task.index}, {what} of {task.module or 'the model'}",
                "a step without it",
                "measure the model, batch and loss that the graph was captured from",
            )
    return seconds


def _key(task: Task) -> tuple:
    return task.phase, task.op, task.call, task.part
