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
from dataclasses import dataclass
from typing import Any

import torch

from gistkit.errors import PlanMismatchError
from gistkit.graph.capture import no_autocast_cache, untouched_random_states
from gistkit.graph.ledger import tensors_in
from gistkit.graph.recorder import Recorder
from gistkit.graph.saved import SavedGraph
from gistkit.graph.step import tasks_with_spans
from gistkit.graph.tasks import Task
from gistkit.graph.trace import Span, Tracer
from gistkit.graph.traced import loss_of
from gistkit.runtime.attach import compressed_forward, restore

Timing = tuple[Span, Any, Any]
SLEEP_CYCLES = 400_000
"""Of the device before each operator, about 0.2 ms: the host needs 20 to 150 us to queue one."""


@dataclass(frozen=True)
class Work:
    """What one step is made of: a model's arguments, and what its loss takes besides."""

    args: tuple
    kwargs: dict[str, Any]
    targets: tuple = ()
    loss_fn: Callable[..., torch.Tensor] | None = None


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
    return measured_step(graph, model, Work(args, kwargs or {}, targets, loss_fn), repeats=repeats)[0]


def measured_step(
    graph: SavedGraph, model: torch.nn.Module, work: Work, *, repeats: int = 3
) -> tuple[dict[int, float], float]:
    """:func:`measured_tasks`, and the seconds of the whole step when nobody watches it, until the device is done.

    The steps that nobody watches come first, two of them, of which the faster one counts.
    """
    if repeats < 1:
        raise ValueError(f"measured_tasks: repeats must be at least 1, got {repeats}; give 3")
    if not graph.tasks:
        raise ValueError("measured_tasks: graph must have tasks, got none; capture the model with backward=True")
    best: dict[int, float] = {}
    with untouched_random_states(), torch.enable_grad(), no_autocast_cache():
        twin = _plain_twin(model)
        whole_s = min(_unwatched(twin, work) for _ in range(2))
        for _ in range(repeats):
            twin.zero_grad(set_to_none=True)
            taken = _one_step(graph, twin, work)
            best = {task: min(seconds, best.get(task, seconds)) for task, seconds in taken.items()}
    return best, whole_s


def _plain_twin(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy without gradients and without any part compressed."""
    twin = copy.deepcopy(model)
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
    loss_of(model(*work.args, **work.kwargs), work.targets, work.loss_fn).backward()
    _drain(cards)
    return time.perf_counter() - start


def _drain(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _cards(*items: Any) -> set[torch.device]:
    """The CUDA devices of all tensors in some items."""
    return {t.device for t in tensors_in(items) if t.device.type == "cuda"}


class _Timer(Tracer):
    """A tracer of a real step that notes when every operator began and ended."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.timings: list[Timing] = []

    def run(self, span: Span, func: Any, args: tuple, kwargs: dict) -> Any:
        if func.is_view:  # nothing runs; most are the recorder's own
            return func(*args, **kwargs)
        device = _card(args, kwargs)
        if device is None:
            start = time.perf_counter()
            out = func(*args, **kwargs)
            self.timings.append((span, start, time.perf_counter()))
            return out
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record(stream)
            out = func(*args, **kwargs)
            end.record(stream)
        self.timings.append((span, begin, end))
        return out

    def seconds(self) -> dict[int, float]:
        """Seconds by ``id`` of the span. Waits for the device."""
        total: dict[int, float] = defaultdict(float)
        for span, begin, end in self.timings:
            if isinstance(begin, float):
                total[id(span)] += end - begin
            else:
                end.synchronize()
                total[id(span)] += begin.elapsed_time(end) / 1e3
        return total


def _card(args: tuple, kwargs: dict) -> torch.device | None:
    """The CUDA device on which an operator runs; None for one of the CPU."""
    devices = (t.device for t in tensors_in((args, kwargs)) if t.device.type == "cuda")
    made = torch.device(kwargs.get("device") or "cpu")
    return next(devices, made if made.type == "cuda" else None)


def _one_step(graph: SavedGraph, model: torch.nn.Module, work: Work) -> dict[int, float]:
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
