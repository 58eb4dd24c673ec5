"""Convolution algorithms as planner data: seconds and workspace of each, from the shape and the device. Pure data.

A task has PyTorch's default alone: the roofline, and on CUDA 4 bytes of workspace a filter element and output pixel.
Costs with several, as the papers' frameworks had (:mod:`bench.papers.algorithms`), come by ``cost_table(ways=...)``.

On tensor cores (a device with ``tf32``) cuDNN brings NCHW maps into NHWC and back. That takes two passes over each
and both maps a second time: VGG-16's conv1_2 had 1,563 to 1,568 of 1,568 MiB on an H200 (fp32, batch 64), some 1x1
filters less than half of them; counted for all, too much by 3 to 12 % of such a peak and never too little.

A plan names a call's algorithms in one text: ``winograd`` for all of its tasks, or one for each task by its part or
phase, ``forward=winograd,weight=fft,input=implicit_gemm``. Only cuDNN's engines (``engine68``, :mod:`gistkit.kernels`)
are carried out; any other name leaves the task to PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gistkit.ir import Task
from gistkit.kernels import ENGINE
from gistkit.planning.cost.devices import Hardware

DEFAULT = "implicit_precomp_gemm"
"""What PyTorch is taken to run."""
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Algorithm:
    """One way to run a task: seconds, and the bytes it needs beside its reads and writes while it runs."""

    name: str
    seconds: float
    workspace_bytes: int

    @property
    def is_engine(self) -> bool:
        """Whether it is an engine of cuDNN, which the runtime runs and which may add in another order."""
        return self.name.startswith(ENGINE)


def by_part(names: Mapping[str, str]) -> str:
    """The text for algorithms by part: one name where all are equal."""
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ",".join(f"{part}={name}" for part, name in names.items())


def of_part(algorithm: str, part: str) -> str:
    """The algorithm of one part; '' (the default) where the text names other parts only."""
    if "=" not in algorithm:
        return algorithm
    return dict(item.split("=", 1) for item in algorithm.split(",")).get(part, "")


def arithmetic_rate(hardware: Hardware, dtype: str, *, conv: bool = False) -> float:
    """Operations per second on a dtype; fp32 convolutions on ``tf32`` where the device has it (PyTorch's default).
    A dtype without a rate gets fp32's, float64 half of it."""
    rates = hardware.flops
    if conv and dtype == "float32":
        return rates.get("tf32", rates["float32"])
    return rates.get(dtype, rates["float32"] * (0.5 if dtype == "float64" else 1.0))


def layout_bytes(task: Task, hardware: Hardware) -> int:
    """Bytes of the NHWC copies of a convolution's two maps or their gradients, 0 where the device has no ``tf32``."""
    shape = task.conv
    if shape is None or "tf32" not in hardware.flops or task.dtype == "float64":
        return 0
    elements = shape.n * (shape.c * shape.h * shape.w + shape.k * shape.out_h * shape.out_w)
    return elements * ITEMSIZE.get(task.dtype, 4)


def roofline_s(flops_s: float, moved_bytes: float, hardware: Hardware) -> float:
    """The longer of arithmetic and traffic, at least a launch."""
    return max(flops_s, moved_bytes / (hardware.memory_gbps * 1e9), hardware.launch_s)


def default_algorithm(task: Task, hardware: Hardware) -> Algorithm:
    """What PyTorch is taken to run for a convolution's task (forward, ``weight`` or ``input``). A device without
    asynchronous counts (a CPU) has ``direct``, without workspace."""
    shape = task.conv
    assert shape is not None
    seconds = roofline_s(task.flops / arithmetic_rate(hardware, task.dtype, conv=True), task.moved_bytes, hardware)
    if not hardware.async_counts:
        return Algorithm("direct", seconds, 0)
    offsets_bytes = 4 * (shape.c // shape.groups * math.prod(shape.kernel) + shape.out_h * shape.out_w)
    copied_bytes = layout_bytes(task, hardware)
    layout_s = 2 * copied_bytes / (hardware.memory_gbps * 1e9)
    return Algorithm(DEFAULT, layout_s + seconds, offsets_bytes + copied_bytes)
