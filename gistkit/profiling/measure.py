"""Seconds of every task of one plain training step, measured where it runs (vDNN section III-C and moDNN section IV-A
profile likewise before they plan).

The operators of a real step are timed one by one and put down to the forward call or backward node that runs them, as
the capture does on fake tensors; the tasks of both are then matched. On CUDA an operator is timed by a pair of events
around it. The host's own time for the watching lies between operators and is not counted; but where the device waits
for the host, an operator's launch is: tasks of a few tens of microseconds read too long.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gistkit.capture import (
    Recorder,
    Span,
    Tracer,
    deep_copy,
    loss_of,
    no_autocast_cache,
    on_copy,
    others_untouched,
    tasks_with_spans,
    tensors_in,
    untouched_random_states,
)
from gistkit.errors import PlanMismatchError
from gistkit.ir import SavedGraph, Task
from gistkit.runtime import compressed_forward, restore

Timing = tuple[Span, str, Any, Any]
_CONV_BACKWARD = torch.ops.aten.convolution_backward.default
_CONVS = (torch.ops.aten.convolution.default, _CONV_BACKWARD)
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


def measured_step(graph: SavedGraph, model: torch.nn.Module, work: Work, *, repeats: int = 3) -> Measured:
    """The seconds of every task of ``graph``, which ``capture(..., backward=True)`` made of this model, for
    ``cost_table``, with the workspace of convolutions and the seconds of the whole step.

    Runs ``repeats`` steps after two that nobody watches, of which the faster one counts, on a deep copy of the model in
    plain PyTorch, on the device that model and arguments are on; each task's least time counts. Model, gradients and
    random states stay as they are. A convolution's two gradients are taken one after the other, as the runtime takes
    them; a linear's two tasks get half of its backward's time each. Tasks of no call that this step does not have are
    left out. Synchronises; on CUDA the allocator's peak statistics begin anew.

    Raises ValueError for ``repeats`` below 1 or a graph without tasks, PlanMismatchError where the step has not the
    graph's tasks.
    """
    if repeats < 1:
        raise ValueError(f"measured_step: repeats must be at least 1, got {repeats}; give 3")
    if not graph.tasks:
        raise ValueError("measured_step: graph must have tasks, got none; capture the model with backward=True")
    best: dict[int, float] = {}
    workspace_bytes: dict[int, int] = {}
    with untouched_random_states(), torch.enable_grad(), no_autocast_cache():
        twin = _plain_twin(model)
        work = replace(work, loss_fn=on_copy(work.loss_fn, model, twin))
        whole_s = min(_unwatched(twin, work) for _ in range(2))
        for _ in range(repeats):
            twin.zero_grad(set_to_none=True)
            taken, workspace_bytes = _one_step(graph, twin, work)
            best = {task: min(seconds, best.get(task, seconds)) for task, seconds in taken.items()}
    return Measured(best, workspace_bytes, whole_s)


def _plain_twin(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy without gradients and without any part compressed."""
    twin = deep_copy(model)
    for module in list(twin.modules()):
        if compressed_forward(module) is not None:
            restore(module)
    return twin


def _unwatched(model: torch.nn.Module, work: Work) -> float:
    """Seconds of one step."""
    model.zero_grad(set_to_none=True)
    cards = _cards(list(model.parameters()), work.args, work.kwargs)
    _drain(cards)
    start = time.perf_counter()
    loss = loss_of(model(*work.args, **work.kwargs), work.targets, work.loss_fn)
    with others_untouched(loss, model.parameters()):
        loss.backward()
    _drain(cards)
    return time.perf_counter() - start


def _drain(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _cards(*items: Any) -> set[torch.device]:
    """The CUDA devices of all tensors in some items."""
    return {t.device for t in tensors_in(items) if t.device.type == "cuda"}


class _Timer(Tracer):
    """A tracer of a real step that notes when every operator began and ended, by span and by part of it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.timings: list[Timing] = []
        self.workspace_bytes: dict[tuple[int, str], int] = {}

    def run(self, span: Span, func: Any, args: tuple, kwargs: dict) -> Any:
        if func.is_view:  # nothing runs; most are the recorder's own
            return func(*args, **kwargs)
        if func is not _CONV_BACKWARD or kwargs:
            return self._timed(span, "", func, args, kwargs)
        *given, mask = args
        if not mask[0] or not any(mask[1:]):
            return self._timed(span, "input" if mask[0] else "weight", func, args, kwargs)
        _, weight, bias = self._timed(span, "weight", func, (*given, [False, *mask[1:]]), kwargs)
        return self._timed(span, "input", func, (*given, [True, False, False]), kwargs)[0], weight, bias

    def _timed(self, span: Span, part: str, func: Any, args: tuple, kwargs: dict) -> Any:
        device = _card(args, kwargs)
        if device is None:
            start = time.perf_counter()
            out = func(*args, **kwargs)
            self.timings.append((span, part, start, time.perf_counter()))
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
        self.timings.append((span, part, begin, end))
        if func in _CONVS:
            passing_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
            key = id(span), part
            self.workspace_bytes[key] = max(passing_bytes, self.workspace_bytes.get(key, 0))
        return out

    def seconds(self) -> dict[tuple[int, str], float]:
        """Seconds by ``id`` of the span and part of it. Waits for the device."""
        total: dict[tuple[int, str], float] = defaultdict(float)
        for span, part, begin, end in self.timings:
            if isinstance(begin, float):
                total[id(span), part] += end - begin
            else:
                end.synchronize()
                total[id(span), part] += begin.elapsed_time(end) / 1e3
        return total


def _card(args: tuple, kwargs: dict) -> torch.device | None:
    """The CUDA device on which an operator runs; None for one of the CPU."""
    devices = (t.device for t in tensors_in((args, kwargs)) if t.device.type == "cuda")
    made = torch.device(kwargs.get("device") or "cpu")
    return next(devices, made if made.type == "cuda" else None)


def _one_step(graph: SavedGraph, model: torch.nn.Module, work: Work) -> tuple[dict[int, float], dict[int, int]]:
    # "fake": a recording that calls itself real counts the zeros of all that is saved, which nobody asked for here.
    recorder = Recorder(model, source="fake")
    timer, notes = _Timer(recorder), recorder.notes
    timer.outside([*model.parameters(), *model.buffers()])
    with timer:
        with recorder:
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
    taken = timer.seconds()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    spans = _matched(graph, tasks_with_spans(forward, notes, timer, gradients))
    seconds = {task: sum(taken.get((i, p), 0.0) * share for p, share in parts) for task, (i, parts) in spans.items()}
    space = timer.workspace_bytes
    workspace = {task: max((space.get((i, p), 0) for p, _ in parts), default=0) for task, (i, parts) in spans.items()}
    return seconds, {task: nbytes for task, nbytes in workspace.items() if nbytes}


Parts = tuple[int, tuple[tuple[str, float], ...]]
"""The ``id`` of a span, and the parts of it that are a task's, each with the share that is."""


def _matched(graph: SavedGraph, ran: list[tuple[Task, Span]]) -> dict[int, Parts]:
    """What a task of the graph is of the spans; what ran beside its tasks (a gradient copied on its way to ``.grad``)
    is left out."""
    shares: dict[int, int] = defaultdict(int)
    for _, span in ran:
        shares[id(span)] += 1
    found: dict[tuple, deque[Parts]] = defaultdict(deque)
    for task, span in ran:
        whole = (("", 1.0), ("weight", 1.0), ("input", 1.0))
        half = (("", 1 / shares[id(span)]), (task.part, 1.0))
        found[_key(task)].append((id(span), whole if shares[id(span)] == 1 else half))
    matched = {}
    for task in graph.tasks:
        if found[_key(task)]:
            matched[task.index] = found[_key(task)].popleft()
        elif task.call >= 0:
            what = " ".join(filter(None, (task.phase, task.op, task.part)))
            raise PlanMismatchError(
                f"the task {task.index}, {what} of {task.module or 'the model'}",
                "a step without it",
                "measure the model, batch and loss that the graph was captured from",
            )
    return matched


def _key(task: Task) -> tuple:
    return task.phase, task.op, task.call, task.part
