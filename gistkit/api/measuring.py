"""measure: the seconds of every task of a plain step where it runs, for a plan at once (``gistkit.plan(model, batch,
measure=True)``) or through a file that the caller names (vDNN, section III-C; moDNN, IV-A). And costs from measured
steps: the host's seconds a task with which a plan's predicted step is the measured one.

A file of steps holds JSON objects, one a line: the ``plan`` that ran, ``step_s``, the seconds of its forward and
backward, and, if known, ``densities`` (``gistkit.report(model).densities``). Further fields do not matter: what
``gistkit plan --json`` wrote, with ``step_s`` added, is one, and what ``gistkit train --policy NAME --json`` writes."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gistkit.api.capturing import step_on, with_least_rows
from gistkit.capture import spread
from gistkit.errors import MeasureError, PlanMismatchError, quoted
from gistkit.ir import Plan, SavedGraph, from_json
from gistkit.planning.cost import ANEW, HOST_FIGURES, CostTable, Hardware, StepTimes, cost_table, preset_name
from gistkit.planning.simulate import by_pytorch, simulate
from gistkit.profiling import Work, all_tensors, device_name, step_times

_log = logging.getLogger("gistkit")
Measure = bool | str | Path | StepTimes | None
"""What ``measure=`` may be: True to measure, a file of times or the times themselves, False for the roofline, None to
measure where the step is on a CUDA card that nobody named another for."""
INSTEAD = "a file of times that were measured elsewhere (measure=FILE), or measure=False"


def measure(model: torch.nn.Module, *batch: Any, loss_fn: Callable[..., torch.Tensor] | None = None) -> StepTimes:
    """The seconds of every task of a plain step of ``model`` on ``batch``, on the device that they are on.

    Model, batch and ``loss_fn`` as :func:`gistkit.plan` takes them, but real. A few steps run, on a deep copy: the
    model, its gradients and all random states stay as they are, to the bit. Where a plain step does not fit, it is
    taken on half of the rows, and so on (``rows`` tells on how many), and scaled. Give the result to
    ``gistkit.plan(..., measure=times)``, or write ``times.to_json()`` to a file and give its path.

    Raises ValueError for a model or batch that is fake or on the meta device, :class:`gistkit.MeasureError` where not
    even one row fits, CaptureError where the step cannot be captured, and what the step itself raises.
    """
    found = captured("measure", model, batch, loss_fn, None, True)[2]
    assert found is not None
    return found


def captured(
    caller: str,
    model: torch.nn.Module,
    batch: tuple,
    loss_fn: Callable[..., torch.Tensor] | None,
    which: Hardware | str | Path | None,
    measure: Measure,
    cut: Callable[[SavedGraph], bool] = lambda graph: False,
    hold_output: bool = True,
    engines: bool = True,
) -> tuple[SavedGraph, Hardware, StepTimes | None]:
    """The captured step and its hardware (:func:`step_on`), the times that ``measure`` asks for, None for False; where
    ``cut`` says so of the graph, with the step of the least rows. ``engines``: cuDNN's are measured, too, where they
    can be. A step measured unasked that does not fit the card with one row, or runs other tasks than its graph has, has
    no times, and the log says why. Raises ValueError, TypeError, CaptureError, MeasureError and PlanMismatchError in
    the name of ``caller``."""
    times, unasked = None, measure is None
    if measure is None:
        measure = which is None and on_cuda(model, batch)
    elif measure is True:
        check_real(caller, model, batch)
    elif measure is not False:
        times = read_times(caller, measure)
    graph, hardware = step_on(caller, model, batch, loss_fn, which, hold_output)
    if cut(graph):
        graph = with_least_rows(graph, model, batch, loss_fn, hold_output)
    if times is not None:
        times.check(graph)
        check_present(caller, hardware, times.device)
    elif measure is True:
        check_present(caller, hardware, device_name(model, batch))
        work = Work(batch, {}) if loss_fn is None else Work(*spread(batch[0]), batch[1:], loss_fn)
        try:
            times = step_times(graph, hardware, model, work, engines=engines)
        except (MeasureError, PlanMismatchError) as error:
            if not unasked:
                raise
            _log.warning("%s: by the card's rates, as the step could not be measured: %s", caller, error)
    return graph, hardware, times


def costs_of(
    graph: SavedGraph,
    hardware: Hardware,
    times: StepTimes | None = None,
    density: float | Mapping[int, float] | None = None,
) -> CostTable:
    """The costs of a captured step with the measured times where there are some, else as predicted."""
    if times is None:
        return cost_table(graph, hardware, density=density)
    if times.host_s and times.runtime_host_s and hardware.host_s:
        hardware = replace(hardware, **{name: getattr(times, name) for name in HOST_FIGURES})
    measured = {"measured_s": times.seconds, "workspace_bytes": times.workspace_bytes, "engines": times.engines}
    return cost_table(graph, hardware, density=density, **measured)


def with_times(made: Plan, times: StepTimes | None) -> Plan:
    """The plan with a prediction that names the measured times it was made with (None: predicted ones)."""
    return replace(made, prediction=replace(made.prediction, measured=None if times is None else times.measured))


def read_times(caller: str, which: str | Path | StepTimes) -> StepTimes:
    """Times as they are, or those in a file. Raises TypeError for anything else, ValueError for a file that is not
    there, cannot be read or holds no times."""
    if isinstance(which, StepTimes):
        return which
    if not isinstance(which, str | Path):
        raise TypeError(
            f"{caller}: measure must be True, False, the path of a file of times or what gistkit.measure returned, got "
            f"{type(which).__name__}; pass one of these"
        )
    try:
        if Path(which).exists() and not Path(which).is_file():  # a device or a FIFO may give bytes without end
            raise OSError("no regular file")
        return StepTimes.from_json(Path(which).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{caller}: the file of times {which} cannot be read ({error}); {ANEW}") from error
    except ValueError as error:
        raise ValueError(f"{caller}: the file of times {which}: {str(error).removeprefix('times: ')}") from error


def on_cuda(model: torch.nn.Module, batch: tuple) -> bool:
    """Whether all tensors are real ones on one CUDA card."""
    places = {None if isinstance(t, FakeTensor) else t.device for t in all_tensors(model, batch)}
    return len(places) == 1 and all(place is not None and place.type == "cuda" for place in places)


def check_real(caller: str, model: torch.nn.Module, batch: tuple, instead: str = INSTEAD) -> None:
    """Raise ValueError where nothing could run: tensors that are fake, or on a device but the CPU and CUDA."""
    for t in all_tensors(model, batch):
        fake = isinstance(t, FakeTensor)
        if fake or t.device.type not in ("cpu", "cuda"):
            got = "a fake tensor" if fake else f"one on device {str(t.device)!r}"
            raise ValueError(
                f"{caller}: measuring needs model and batch with real tensors on a CPU or CUDA device, got {got}; pass "
                f"real ones, {instead}"
            )


def check_present(caller: str, hardware: Hardware, device: str) -> None:
    """Raise ValueError where times measured on ``device`` say nothing of ``hardware``."""
    named = device in hardware.name or preset_name(device) == hardware.name
    if hardware.async_counts != (device != "cpu") or (hardware.async_counts and not named):
        raise ValueError(
            f"{caller}: measured times must be of the hardware that is planned for, {hardware.name!r}, got times of "
            f"{device!r}; leave hardware out, name a file of `gistkit calibrate` on that device, or do not measure"
        )


FIELDS = {"plan": "plan.to_json()", "step_s": "seconds", "densities": "{storage: share}, may be left out"}


@dataclass(frozen=True)
class _Fields:
    plan: dict[str, Any]
    step_s: float
    densities: dict[int, float] = field(default_factory=dict)


class MeasuredStep(NamedTuple):
    """A plan, and the seconds that a step under it took, with the densities that it had."""

    plan: Plan
    step_s: float
    densities: dict[int, float]


def read_steps(path: Path) -> list[MeasuredStep]:
    """The measured steps of a file. Raises ValueError for any other file: the place in it, what was expected there."""
    try:
        found = [_step(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not found:
            raise ValueError("expected an object, got none")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"measured steps {path}: {error}; write objects with {FIELDS}, one a line") from error


def _step(item: Any) -> MeasuredStep:
    known = {n: v for n, v in item.items() if n in FIELDS} if isinstance(item, dict) else item
    found = from_json(_Fields, json.dumps(known))[0]
    if not 0 < found.step_s < math.inf:
        raise ValueError(f"step_s: expected seconds above 0, got {quoted(found.step_s)}")
    return MeasuredStep(Plan.from_json(json.dumps(found.plan)), found.step_s, found.densities)


def fitted(graph: SavedGraph, costs: CostTable, steps: list[MeasuredStep]) -> CostTable:
    """The costs with the host's seconds a task that the steps tell, of several the median: ``host_s`` by plans that
    PyTorch's own operators run, ``runtime_host_s`` by others. Raises ValueError for a plan of another model, batch or
    hardware, and for a step that no host makes as long as measured."""
    by_field: dict[str, list[float]] = {"host_s": [], "runtime_host_s": []}
    for step in steps:
        _check_step(step.plan, graph, costs)
        name = "host_s" if by_pytorch(step.plan) else "runtime_host_s"
        by_field[name].append(_host_s(step, name, graph, costs))
    figures: dict[str, Any] = {name: statistics.median(found) for name, found in by_field.items() if found}
    shown = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in figures.items())
    source = f"{costs.hardware.source}; {shown}, fitted to {len(steps)} measured steps"
    return replace(costs, hardware=replace(costs.hardware, source=source, **figures))


def _check_step(plan: Plan, graph: SavedGraph, costs: CostTable) -> None:
    of_hardware = "hardware", costs.hardware.name, plan.hardware
    of_step = ("model", graph.fingerprint, plan.fingerprint), ("batch", graph.batch, plan.contract.batch)
    for what, planned, measured in (*of_step, of_hardware):
        if planned != measured:
            raise ValueError(
                f"measured steps must be of the {what} planned, {planned!r}, got {measured!r}; name that "
                f"{what}, or measure steps of this one"
            )


def _host_s(step: MeasuredStep, name: str, graph: SavedGraph, costs: CostTable) -> float:
    """The host's seconds a task with which the step takes as long as measured: the more, the longer it takes."""

    def predicted_s(host_s: float) -> float:
        figures: dict[str, Any] = {name: host_s}
        return simulate(graph, step.plan, replace(costs, hardware=replace(costs.hardware, **figures))).step_s

    low, high = 0.0, min(1.0, step.step_s)
    if not predicted_s(low) <= step.step_s <= predicted_s(high):
        raise ValueError(
            f"measured steps: step_s must be at least what the device takes, {predicted_s(low):.6f} predicted for the "
            f"{step.plan.policy} plan and a host of no time, got {step.step_s:.6f}; measure the tasks' seconds, too "
            "(--measure, --times), or the device's rates with `gistkit calibrate`"
        )
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted_s(middle) <= step.step_s else (low, middle)
    return low
