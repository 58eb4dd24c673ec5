"""StepTimes: the seconds of every task of one step as measured on one device, in place of the roofline's in
:func:`gistkit.planning.cost.table.cost_table` (vDNN, section III-C; moDNN, IV-A). Pure data, JSON both ways; a file of
them is for one step, known by its fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field

from gistkit.errors import quoted
from gistkit.ir import Measured, SavedGraph, from_json, to_json
from gistkit.planning.cost.algorithms import Algorithm

FORMAT, VERSION = "gistkit.times", 2
HOST_FIGURES = ("host_s", "runtime_host_s", "move_host_factor", "form_host_factor")
"""The host's, of :class:`StepTimes` as of :class:`Hardware`."""
ANEW = "measure anew: `gistkit profile MODEL --measure --times FILE`, or gistkit.measure(model, *batch)"


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of one step.

    ``fingerprint`` is that of the step (:func:`step_fingerprint`); ``device`` is ``cpu`` or the name of the CUDA card;
    ``batch`` the rows of the step. ``rows`` is how many of them the measured steps had: fewer where all of them did
    not fit, and ``seconds`` by task, which are always those of the whole batch, are scaled then. ``step_s`` is the time
    of one such step of ``rows`` rows that nobody watched, from its start until the device was done.

    ``workspace_bytes`` are those of each convolution's tasks in a step of the whole batch, ``channels_last_bytes`` what
    they would be in that memory format, for tasks of which that is less; both empty on a CPU. ``host_s`` and
    ``runtime_host_s`` are the host's seconds for one task of this model, ``move_host_factor`` and ``form_host_factor``
    how many of them what a plan adds takes (:class:`Hardware`); 0, 0, 1 and 0: not known. ``engines`` are cuDNN's for
    tasks of covered convolutions, each with its seconds and workspace on the whole batch.
    """

    fingerprint: str
    device: str
    batch: int
    rows: int
    step_s: float
    seconds: dict[int, float]
    workspace_bytes: dict[int, int] = field(default_factory=dict)
    channels_last_bytes: dict[int, int] = field(default_factory=dict)
    host_s: float = 0.0
    runtime_host_s: float = 0.0
    move_host_factor: float = 1.0
    form_host_factor: float = 0.0
    engines: dict[int, tuple[Algorithm, ...]] = field(default_factory=dict)

    @property
    def workspace_remedy(self) -> str:
        """What the largest workspace would be in channels_last, for people; empty where that saves less than 64 MiB."""
        most = max(self.workspace_bytes.values(), default=0)
        then = max((self.channels_last_bytes.get(t, n) for t, n in self.workspace_bytes.items()), default=0)
        if then > most - 64 * 2**20:
            return ""
        return (
            f"convolutions take up to {most / 2**20:,.0f} MiB of workspace, in channels_last {then / 2**20:,.0f} MiB: "
            "model.to(memory_format=torch.channels_last), and the batch"
        )

    @property
    def total_s(self) -> float:
        """The seconds of all tasks of the whole batch."""
        return math.fsum(self.seconds.values())

    @property
    def measured(self) -> Measured:
        return Measured(self.device, self.batch, self.rows, self.step_s, self.fingerprint)

    def to_json(self) -> str:
        """The times as JSON text."""
        return to_json(self, indent=1, format=FORMAT, version=VERSION)

    @staticmethod
    def from_json(text: str) -> StepTimes:
        """The times of :meth:`to_json`'s text. Raises ValueError, with the place, for any other."""
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
        if not 0 < self.step_s < math.inf:
            _refuse("step_s", "seconds above 0", self.step_s)
        for name in HOST_FIGURES:
            if not 0 <= getattr(self, name) < math.inf:
                _refuse(name, "at least 0" + " seconds" * name.endswith("_s"), getattr(self, name))
        for task, taken in self.seconds.items():
            if task < 0 or not 0 < taken < math.inf:
                _refuse("seconds", "seconds above 0 by number of a task", {task: taken})
        for name in ("workspace_bytes", "channels_last_bytes"):
            for task, nbytes in getattr(self, name).items():
                if task < 0 or nbytes < 0:
                    _refuse(name, "bytes of at least 0 by number of a task", {task: nbytes})
        for task, known in self.engines.items():
            for a in known:
                if task < 0 or not a.is_engine or not 0 < a.seconds < math.inf or a.workspace_bytes < 0:
                    _refuse("engines", "engines with seconds above 0 and bytes by number of a task", {task: a})

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


def _refuse(field: str, demand: str, value: object) -> None:
    raise ValueError(f"times: {field} must be {demand}, got {quoted(value)}; {ANEW}")
