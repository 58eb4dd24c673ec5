"""Costs from measured steps: the host's seconds a task with which a plan's predicted step is the measured one.

A file holds JSON objects, one a line: the ``plan`` that ran, ``step_s``, the seconds of its forward and backward, and,
if known, ``densities`` (``gistkit.report(model).densities``). Further fields do not matter: what
``gistkit plan --json`` wrote, with ``step_s`` added, is one, and what ``gistkit train --policy NAME --json`` writes."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from gistkit.errors import quoted
from gistkit.ir import Plan, SavedGraph, from_json
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate import PLAIN_POLICIES, simulate

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
    """The costs with the host's seconds a task that the steps tell, of several the median: ``host_s`` by plans of
    `plain`, ``runtime_host_s`` by others. Raises ValueError for a plan of another model, batch or hardware, and for a
    step that no host makes as long as measured."""
    by_field: dict[str, list[float]] = {"host_s": [], "runtime_host_s": []}
    for step in steps:
        _check(step.plan, graph, costs)
        name = "host_s" if step.plan.policy in PLAIN_POLICIES else "runtime_host_s"
        by_field[name].append(_host_s(step, name, graph, costs))
    figures: dict[str, Any] = {name: statistics.median(found) for name, found in by_field.items() if found}
    shown = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in figures.items())
    source = f"{costs.hardware.source}; {shown}, fitted to {len(steps)} measured steps"
    return replace(costs, hardware=replace(costs.hardware, source=source, **figures))


def _check(plan: Plan, graph: SavedGraph, costs: CostTable) -> None:
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
