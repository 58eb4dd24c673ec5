"""CostTable: seconds and workspace of a task, seconds and bytes of a codec, seconds of a transfer. Pure data. A task's
seconds are the roofline's, the larger of operations / rate and traffic / bandwidth, at least a launch, or measured ones
(``measured_s``); a codec's come from a measured table (:mod:`gistkit.planning.cost.codec_costs`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gistkit.codecs import Sparse, dtype_of
from gistkit.codecs import codec as find_codec
from gistkit.formats import item_bytes
from gistkit.ir import FORMS, STAY, Reading, SavedGraph, Task
from gistkit.planning.cost.algorithms import Algorithm, arithmetic_rate, default_algorithm
from gistkit.planning.cost.codec_costs import RELU_BACKWARD_PASSES, passes
from gistkit.planning.cost.density import Densities
from gistkit.planning.cost.devices import Hardware

OP_EFFICIENCY = {
    ("max_pool2d", "forward"): 0.5,
    ("max_pool2d", "backward"): 0.25,
    ("batch_norm", "forward"): 2 / 3,
    ("batch_norm", "backward"): 3 / 5,
}
"""Share of the copy bandwidth that PyTorch's operators reach on a GPU where it is not all of it, each operand counted
once. Max-pools with int64 indices: measured on an H200 (layer benchmark, fp32), 0.57 and 0.43 forward, 0.17 and 0.14
backward. Batch norm reads its input twice, and in backward the gradient too."""


def task_algorithms(task: Task, hardware: Hardware) -> tuple[Algorithm, ...]:
    """What PyTorch is taken to run for a task: one algorithm, unnamed but of a convolution."""
    if task.conv is not None:
        return (default_algorithm(task, hardware),)
    rate = arithmetic_rate(hardware, task.dtype, conv=task.op.startswith("conv"))
    efficiency = OP_EFFICIENCY.get((task.op, task.phase), 1.0) if hardware.async_counts else 1.0
    moved_s = task.moved_bytes / (hardware.memory_gbps * 1e9 * efficiency)
    # What moves nothing and computes nothing (a view, a reshape) launches nothing.
    launch_s = hardware.launch_s if task.moved_bytes or task.flops else 0.0
    return (Algorithm("", max(task.flops / rate, moved_s, launch_s), 0),)


GRAPH_LIBRARIES_BYTES = 64 * 2**20
"""What the libraries take once more while a CUDA graph is captured: 35 to 63 MiB on an H100."""
Ways = Callable[[Task, Hardware], tuple[Algorithm, ...]]


@dataclass(frozen=True)
class CostTable:
    """What everything costs on one device. ``algorithms[task]`` holds at least one entry; the first is what PyTorch is
    taken to run. ``densities`` are by storage of the SavedGraph, for those that may hold zeros; without any nothing is
    kept sparse. ``ways`` gives the algorithms of any task. ``captured``: the step runs as a CUDA graph."""

    hardware: Hardware
    algorithms: tuple[tuple[Algorithm, ...], ...]
    densities: Mapping[int, float]
    ways: Ways = task_algorithms
    captured: bool = False

    def in_cuda_graph(self) -> CostTable:
        """The costs of the step's replays as a CUDA graph: the host issues nothing, the libraries hold more, and what a
        graph cannot hold, forms whose size only a run tells, transfers to the host and reruns that draw random numbers,
        cannot be chosen."""
        device = self.hardware
        nothing = dict.fromkeys(("d2h_gbps", "h2d_gbps", "both_gbps", "host_s", "runtime_host_s"), 0.0)
        nbytes = device.libraries_bytes + (GRAPH_LIBRARIES_BYTES if device.async_counts else 0)
        return replace(self, hardware=replace(device, libraries_bytes=nbytes, **nothing), densities={}, captured=True)

    @property
    def has_engines(self) -> bool:
        return any(a.is_engine for known in self.algorithms for a in known)

    def without_engines(self, most_bytes: int = -1) -> CostTable:
        """Without engines of more workspace than that: by default PyTorch's own algorithms, as bitwise moves have."""
        kept = partial(filter, lambda a: not a.is_engine or a.workspace_bytes <= most_bytes)
        return self._ordered(kept) if self.has_engines else self

    def preferring(self, key: Callable[[Algorithm], Any]) -> CostTable:
        """The costs of a step whose default is, of each task with engines, the algorithm of the least ``key``."""
        return self._ordered(lambda known: sorted(known, key=key) if any(a.is_engine for a in known) else known)

    def _ordered(self, order: Callable[[tuple[Algorithm, ...]], Iterable[Algorithm]]) -> CostTable:
        return replace(self, algorithms=tuple(tuple(order(known)) for known in self.algorithms))

    def task_s(self, task: int, algorithm: str = "") -> float:
        """Seconds of a task, by default under its first algorithm."""
        return self._algorithm(task, algorithm).seconds

    def workspace_bytes(self, task: int, algorithm: str = "") -> int:
        """Workspace of a task, by default under its first algorithm."""
        return self._algorithm(task, algorithm).workspace_bytes

    def memory_optimal(self, task: int) -> str:
        """The name of the algorithm with the least workspace, the fastest of these: vDNN's (m)."""
        return min(self.algorithms[task], key=lambda a: (a.workspace_bytes, a.seconds)).name

    def performance_optimal(self, task: int) -> str:
        """The name of the fastest algorithm, of equals the one with the least workspace: vDNN's (p)."""
        return min(self.algorithms[task], key=lambda a: (a.seconds, a.workspace_bytes)).name

    def _algorithm(self, task: int, name: str) -> Algorithm:
        return next(a for a in self.algorithms[task] if name in ("", a.name))

    def payload_bytes(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> int:
        """Bytes of ``nbytes`` of ``dtype`` under a codec; density None: no zeros. ValueError for unknown ones."""
        return find_codec(codec).form.nbytes(nbytes // item_bytes(dtype), item_bytes(dtype), density)

    def scratch(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> tuple[int, int, bool]:
        """Of a sparse codec: bytes of the scratch until its size is known (CUDA), and of packing beside the others;
        whether the scratch is decoded as it is, or packed first, once its size is known."""
        kind, form = dtype_of(dtype), find_codec(codec)
        assert isinstance(form, Sparse)
        n = nbytes // kind.itemsize
        packing_bytes = form.packing_bytes(n if density is None else round(density * n), kind)
        return form.scratch_bytes(n, kind), packing_bytes, form.decodes_scratch

    def encode_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        """Seconds that encoding adds to the step. On a GPU a ReLU writes its ``mask1`` in the same kernel, so only the
        mask's bytes are added. A pool that writes its map instead of an int64 index saves time: negative."""
        form = FORMS[codec]
        if form.returns == STAY:
            return 0.0
        if form.made_by_op:
            return self._own_map_s(codec, nbytes, dtype, "forward")
        if not form.values and self.hardware.async_counts:
            return self._traffic_s(self.payload_bytes(codec, nbytes, dtype, density))
        cost = passes(codec, item_bytes(dtype), density)
        pack = cost.pack if self.hardware.async_counts else 0.0
        return self._passes_s(cost.encode + pack, nbytes) + (2 if pack else 1) * self.hardware.launch_s

    def decode_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        """Seconds that one decoding of the tensor adds. ``mask1`` and the maps are not decoded, their readers run
        on them: what is added there is negative."""
        form = FORMS[codec]
        if form.returns == STAY:
            return 0.0
        if form.made_by_op:
            return self._own_map_s(codec, nbytes, dtype, "backward")
        if not form.values:
            return self.relu_backward_s(codec, nbytes, dtype, density)
        return self._passes_s(passes(codec, item_bytes(dtype), density).decode, nbytes) + self.hardware.launch_s

    def relu_backward_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        """Seconds that a ReLU's backward takes more (less: negative) when it reads the payload, not its output."""
        cost = passes(codec, item_bytes(dtype), density)
        if cost.relu_backward == 0.0:
            return 0.0
        extra = cost.relu_backward * self.hardware.codec_slowdown - RELU_BACKWARD_PASSES
        # where a sparse payload's slots end is summed up before it: a launch more than PyTorch's one
        launch_s = self.hardware.launch_s if FORMS[codec].sparse else 0.0
        return self._traffic_s(extra * nbytes) + launch_s

    def slowed(self, task: Task) -> float:
        """The share by which a transfer beside a task makes it longer: of those alone that moving bytes bounds."""
        flops_s = task.flops / arithmetic_rate(self.hardware, task.dtype, conv=task.op.startswith("conv"))
        return self.hardware.link_interference if self._traffic_s(task.moved_bytes) >= flops_s else 0.0

    def copy_s(self, nbytes: int) -> float:
        """Seconds of an elementwise kernel that reads and writes ``nbytes`` in all."""
        return self._traffic_s(nbytes) + self.hardware.launch_s

    def d2h_s(self, nbytes: int) -> float:
        """Seconds of a copy to the host with the link to itself; infinite where there is no link."""
        return self._link_s(nbytes, self.hardware.d2h_gbps)

    def h2d_s(self, nbytes: int) -> float:
        """Seconds of a copy from the host with the link to itself; infinite where there is no link."""
        return self._link_s(nbytes, self.hardware.h2d_gbps)

    def _traffic_s(self, nbytes: float) -> float:
        return nbytes / (self.hardware.memory_gbps * 1e9)

    def _passes_s(self, count: float, nbytes: int) -> float:
        return self._traffic_s(count * nbytes) * self.hardware.codec_slowdown

    def _link_s(self, nbytes: int, gbps: float) -> float:
        if nbytes == 0:
            return 0.0
        return nbytes / (gbps * 1e9) + self.hardware.launch_s if gbps else math.inf

    def _own_map_s(self, codec: str, nbytes: int, dtype: str, phase: str) -> float:
        pooled = dtype == "int64" and self.hardware.async_counts
        efficiency = OP_EFFICIENCY["max_pool2d", phase] if pooled else 1.0
        return self._traffic_s(self.payload_bytes(codec, nbytes, dtype)) - self._traffic_s(nbytes) / efficiency


def cost_table(
    graph: SavedGraph,
    hardware: Hardware,
    *,
    density: float | Mapping[int, float] | None = None,
    measured_s: Mapping[int, float] | None = None,
    workspace_bytes: Mapping[int, int] | None = None,
    engines: Mapping[int, Iterable[Algorithm]] | None = None,
    ways: Ways = task_algorithms,
) -> CostTable:
    """The costs of a captured step (``capture(..., backward=True)``) on a device. ``density`` None: as recorded, else
    as the operators lead us to expect; a number: of every storage that may hold zeros; a mapping: by storage, the
    others as with None. ``measured_s`` are seconds by task, of its default algorithm; the others keep their ratio to
    it. ``workspace_bytes`` are those measured of convolutions' tasks, which have no other algorithm then but the
    measured ``engines``. ``ways``: as in :class:`CostTable`. Raises ValueError for densities of unknown storages."""
    unknown = [s for s in density if not 0 <= s < len(graph.storages)] if isinstance(density, Mapping) else []
    if unknown:
        raise ValueError(
            f"density must name storages 0 to {len(graph.storages) - 1} of the graph, got {unknown[0]}; take it from "
            "the same capture"
        )
    algorithms = []
    for task in graph.tasks:
        known = ways(task, hardware)
        if measured_s and task.index in measured_s:
            known = _scaled(known, measured_s[task.index])
        if workspace_bytes and task.index in workspace_bytes:
            known = (Algorithm("default", known[0].seconds, workspace_bytes[task.index]),)
            known += tuple((engines or {}).get(task.index, ()))
        algorithms.append(known)
    return CostTable(hardware, tuple(algorithms), _densities(graph, density), ways)


def _scaled(known: tuple[Algorithm, ...], seconds: float) -> tuple[Algorithm, ...]:
    if known[0].seconds == 0.0:
        return tuple(Algorithm(a.name, seconds, a.workspace_bytes) for a in known)
    return tuple(Algorithm(a.name, a.seconds * seconds / known[0].seconds, a.workspace_bytes) for a in known)


def _densities(graph: SavedGraph, density: float | Mapping[int, float] | None) -> dict[int, float]:
    given = density if isinstance(density, Mapping) else {}
    reading = Reading(graph)
    guess = Densities(reading, given)
    found: dict[int, float] = {}
    for storage in graph.storages:
        value = reading.saved(storage.id)
        share = given.get(storage.id) if value is None else guess.of(storage.id, value.version)
        if share is not None:
            found[storage.id] = float(density) if isinstance(density, int | float) else share
    return found
