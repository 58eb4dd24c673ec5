"""StepTimes: the seconds of every task of one step as they were measured on one device. Pure data, JSON both ways.

What takes the place of the roofline in :func:`gistkit.planning.cost.table.cost_table`: vDNN (section III-C) and moDNN
(section IV-A) profile a step before they plan it. A file of them is for one step, known by its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gistkit.errors import quoted
from gistkit.ir import Measured, SavedGraph, from_json, to_json
from gistkit.planning.cost.part_algorithms import DEFAULT, SWITCHES

FORMAT, VERSION = "gistkit.times", 1
ANEW = "measure anew: `gistkit profile MODEL --measure --times FILE`, or gistkit.measure(model, *batch)"
WORTH_SHARE, WORTH_BYTES = 0.03, 2**20
"""What switches have to save to be offered, of a call's seconds or of its workspace."""


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of one step.

    ``fingerprint`` is that of the step (:func:`step_fingerprint`); ``device`` is ``cpu`` or the name of the CUDA card;
    ``batch`` the rows of the step. ``rows`` is how many of them the measured steps had: fewer where all of them did
    not fit, and ``seconds`` by task, which are always those of the whole batch, are scaled then. ``step_s`` is the time
    of one such step of ``rows`` rows that nobody watched, from its start until the device was done.

    ``convolutions`` are the seconds and the workspace in bytes of each convolution's tasks, by the switches of cuDNN
    that it ran under: those in force (``default``), ``benchmark``, ``deterministic``
    (:mod:`gistkit.planning.cost.part_algorithms`). Empty on a CPU, where there is nothing to switch.
    """

    fingerprint: str
    device: str
    batch: int
    rows: int
    step_s: float
    seconds: dict[int, float]
    convolutions: dict[str, dict[int, tuple[float, int]]] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """The seconds of all tasks of the whole batch."""
        return math.fsum(self.seconds.values())

    @property
    def measured(self) -> Measured:
        """What a plan says of them."""
        return Measured(self.device, self.batch, self.rows, self.step_s, self.fingerprint)

    def offered(self, graph: SavedGraph, fidelity: str) -> dict[str, dict[int, tuple[float, int]]]:
        """What a plan of that class of moves may choose for each convolution: the default, and in all classes but
        ``bitwise`` the switches that save a call :data:`WORTH_SHARE` of its seconds or :data:`WORTH_BYTES` of
        workspace, so that no choice is made for a difference that is the clock's."""
        default = self.convolutions.get(DEFAULT, {})
        found = {DEFAULT: dict(default)}
        calls: dict[int, list[int]] = defaultdict(list)
        for task in default:
            calls[graph.tasks[task].call].append(task)
        for name, tasks in self.convolutions.items():
            if name == DEFAULT or fidelity == "bitwise":
                continue
            worth = [own for own in calls.values() if all(t in tasks for t in own) and _gain(default, tasks, own)]
            found[name] = {t: tasks[t] for own in worth for t in own}
        return found

    def to_json(self) -> str:
        """The times as JSON text."""
        return to_json(self, indent=1, format=FORMAT, version=VERSION)

    @staticmethod
    def from_json(text: str) -> StepTimes:
        """The times of :meth:`to_json`'s text. Raises ValueError for any other: the place in it, what was expected
        there and what it has."""
        try:
            return from_json(StepTimes, text, {"format": FORMAT, "version": VERSION})[0]
        except ValueError as error:
            what = str(error).removeprefix("times: ").removesuffix(f"; {ANEW}")
            raise ValueError(f"times: {what}; {ANEW}") from error

    def __post_init__(self) -> None:
        for name in ("fingerprint", "device"):
            if not getattr(self, name):
                _refuse(name, "a text that is not empty", getattr(self, name))
        if not 0 <= self.rows <= self.batch < 2**40:
            _refuse("rows", f"at least 0 and at most the batch's {self.batch}", self.rows)
        if not _is_seconds(self.step_s):
            _refuse("step_s", "seconds above 0", self.step_s)
        for task, taken in self.seconds.items():
            if task < 0 or not _is_seconds(taken):
                _refuse("seconds", "seconds above 0 by number of a task", {task: taken})
        for name, tasks in self.convolutions.items():
            if name not in (DEFAULT, *SWITCHES):
                _refuse("convolutions", f"by {', '.join((DEFAULT, *SWITCHES))}", name)
            for task, (taken, nbytes) in tasks.items():
                if task < 0 or not _is_seconds(taken) or nbytes < 0:
                    _refuse("convolutions", "[seconds above 0, bytes] by number of a task", {task: [taken, nbytes]})

    def check(self, graph: SavedGraph) -> None:
        """Raise ValueError unless these are the times of the graph's step."""
        fingerprint = step_fingerprint(graph)
        if fingerprint != self.fingerprint:
            batch = "" if graph.batch == self.batch else f" of batch {self.batch}"
            raise ValueError(
                f"times: must be those of this step of batch {graph.batch}, fingerprint {fingerprint}, got those of "
                f"another step{batch}, fingerprint {self.fingerprint}; {ANEW}, with this model, batch and loss"
            )


def step_fingerprint(graph: SavedGraph) -> str:
    """Hash of a step's dataflow and of its tasks with the work of each: other sizes make another step."""
    tasks = [(t.phase, t.op, t.call, t.part, t.dtype, t.flops, t.moved_bytes) for t in graph.tasks]
    return hashlib.sha256(json.dumps([graph.fingerprint, graph.batch, tasks]).encode()).hexdigest()[:16]


def _gain(default: Mapping[int, tuple[float, int]], other: Mapping[int, tuple[float, int]], own: list[int]) -> bool:
    faster = sum(other[t][0] for t in own) < (1 - WORTH_SHARE) * sum(default[t][0] for t in own)
    return faster or any(other[t][1] + WORTH_BYTES <= default[t][1] for t in own)


def _is_seconds(value: float) -> bool:
    return 0 < value < math.inf


def _refuse(field: str, demand: str, value: object) -> None:
    raise ValueError(f"times: {field} must be {demand}, got {quoted(value)}; {ANEW}")
