"""A convolution's three tasks under a cuDNN engine chosen by name (the extra ``cudnn``, nvidia-cudnn-frontend).

PyTorch takes the first plan of cuDNN's heuristics that its settings admit. Here the first plan of every engine that the
heuristics have (modes A and FALLBACK) can be listed, with its workspace, and run. Left out is what PyTorch leaves out
(inputs converted to a narrower dtype; tensor cores for fp32 where TF32 is off; under deterministic algorithms what is
not), and what does more than add the same products in another order (Winograd, FFT, sums in less than fp32): results
are ``reassociated``. Engines are named as cuDNN numbers them, ``engine68``; an engine's knobs are its first plan's, as
they change with the number of rows.

Graphs and handles belong to a thread: cuDNN's handles may not be shared, and autograd runs backward in its own.
"""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

DTYPES = {torch.float32: "FLOAT", torch.float16: "HALF", torch.bfloat16: "BFLOAT16"}
OTHER_ARITHMETIC = (
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
"""cuDNN's notes of plans that are not ``reassociated``."""
DEVICES = ("cuda",)
PARTS = ("forward", "weight", "input")
ALIGNED_BYTES = 16
"""Every operand begins at a multiple of this: what the frontend tells cuDNN of each."""
INSTALL = "pip install gistkit[cudnn]"
ENGINE = "engine"
"""What the name of an engine begins with, and no other algorithm's."""


@cache
def engines_missing() -> str:
    """'' where engine plans can be listed and run; else what is missing, with its remedy."""
    if find_spec("cudnn") is None:
        return f"the package nvidia-cudnn-frontend is not installed; {INSTALL}"
    if not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN; install a build for CUDA"
    return ""


@dataclass(frozen=True)
class EnginePlan:
    """An engine's way to run a task: its name, and the bytes that it needs beside its operands while it runs."""

    name: str
    workspace_bytes: int


@dataclass(frozen=True)
class ConvTask:
    """One task of a 2-d convolution. ``part``: ``forward``, ``weight`` or ``input``. Shapes of x [N, C, H, W], weight
    [K, C/groups, KH, KW] and y [N, K, OH, OW], all three in one memory format. ``tf32`` and ``deterministic`` as
    PyTorch's settings were."""

    part: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    y: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    channels_last: bool
    tf32: bool
    deterministic: bool

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of the two operands and of the result: x, weight -> y; x, dy -> weight; dy, weight -> x."""
        x, weight, y = self.x, self.weight, self.y
        return {"forward": (x, weight, y), "weight": (x, y, weight), "input": (y, weight, x)}[self.part]


def conv_task(
    part: str,
    x: tuple[int, ...],
    weight: tuple[int, ...],
    options: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    channels_last: bool,
) -> ConvTask:
    """The task of these shapes under PyTorch's settings of now; ``options``: stride, padding, dilation."""
    stride, padding, dilation = options
    sides = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    out = [(n + 2 * around - apart * (k - 1) - 1) // step + 1 for n, k, step, around, apart in sides]
    deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    tf32 = dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32"
    y = (x[0], weight[0], *out)
    where = tuple(stride), tuple(padding), tuple(dilation), dtype, device
    return ConvTask(part, tuple(x), tuple(weight), y, *where, channels_last, tf32, deterministic)


def engines(task: ConvTask) -> tuple[EnginePlan, ...]:
    """The engines that can run the task, in the order of cuDNN's heuristics; none where cuDNN has none, or the device,
    dtype or size is not taken. Raises RuntimeError, with :func:`engines_missing`, where the package is missing."""
    if task.device.type not in DEVICES or task.dtype not in DTYPES or max(map(math.prod, task.shapes)) >= 2**31:
        return ()  # above, PyTorch cuts the batch
    with _on(task.device):
        graph = _LOCAL.graph(task)
    return tuple(EnginePlan(name, nbytes) for name, (_, nbytes) in graph.plans.items()) if graph else ()


def run_engine_plan(task: ConvTask, name: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The task's result under the named engine, on the current stream; operands as :attr:`ConvTask.shapes`. What has
    another memory format or alignment is copied first, as PyTorch does. Does not synchronise. Raises ValueError for an
    engine that the task has not."""
    with _on(task.device):
        graph = _LOCAL.graph(task)
        if graph is not None and name in graph.plans:
            operands = [_as(t, task.memory_format) for t in (first, second)]
            made = {"dtype": task.dtype, "device": task.device, "memory_format": task.memory_format}
            result = torch.empty(task.shapes[2], **made)
            graph.run(name, (*operands, result), _LOCAL.handle(task.device))
            return result
    known = ", ".join(engine.name for engine in engines(task)) or "none"
    raise ValueError(
        f"cuDNN has no {name!r} for the {task.part} of a convolution of {task.x} by {task.weight}; it has {known}: "
        "plan again on this machine"
    )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """The device as the current one, as a handle of it needs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _as(t: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    t = t.contiguous(memory_format=memory_format)
    return t if t.data_ptr() % ALIGNED_BYTES == 0 else t.clone(memory_format=memory_format)


class _Graph:
    """A task's graph, and by engine the first of its plans that builds: index and bytes of workspace."""

    def __init__(self, task: ConvTask, handle: Any) -> None:
        cudnn = import_module("cudnn")
        self._task, kinds = task, cudnn.data_type
        kind = getattr(kinds, DTYPES[task.dtype])
        self._graph = graph = cudnn.pygraph(
            io_data_type=kind, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
        )
        meta = (torch.empty(shape, device="meta", memory_format=task.memory_format) for shape in task.shapes)
        strides = [list(t.stride()) for t in meta]
        first, second = (
            graph.tensor(dim=list(shape), stride=stride, data_type=kind)
            for shape, stride in zip(task.shapes[:2], strides[:2], strict=True)
        )
        around = {
            "pre_padding": list(task.padding),
            "post_padding": list(task.padding),
            "stride": list(task.stride),
            "dilation": list(task.dilation),
        }
        made = {
            "forward": lambda: graph.conv_fprop(image=first, weight=second, **around),
            "weight": lambda: graph.conv_wgrad(image=first, loss=second, **around),
            "input": lambda: graph.conv_dgrad(loss=first, filter=second, **around),
        }[task.part]()
        made.set_output(True).set_data_type(kind).set_dim(list(task.shapes[2])).set_stride(strides[2])
        self._tensors = first, second, made
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes(_left_out(task, cudnn.numerical_note))
        self.plans: dict[str, tuple[int, int]] = {}
        for index in range(graph.get_execution_plan_count()):
            name = graph.get_plan_name_at_index(index).split("_")[0].replace("eng", ENGINE)
            with suppress(cudnn.cudnnGraphNotSupportedError):  # left out, or not for this device
                if name not in self.plans:
                    graph.build_plan_at_index(index)
                    self.plans[name] = index, graph.get_workspace_size_plan_at_index(index)

    def run(self, name: str, tensors: tuple[torch.Tensor, ...], handle: Any) -> None:
        index, nbytes = self.plans[name]
        # of PyTorch's allocator: taken again only behind this on the stream
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=self._task.device) if nbytes else None
        pointers = {made: t.data_ptr() for made, t in zip(self._tensors, tensors, strict=True)}
        address = None if workspace is None else workspace.data_ptr()
        self._graph.execute_plan_at_index(pointers, address, index=index, handle=handle)


def _left_out(task: ConvTask, notes: Any) -> list[Any]:
    found = [getattr(notes, name) for name in ("DOWN_CONVERT_INPUTS", *OTHER_ARITHMETIC)]
    if task.dtype == torch.float32 and not task.tf32:
        found.append(notes.TENSOR_CORE)
    if task.deterministic:
        found.append(notes.NONDETERMINISTIC)
    return found


class _Local(threading.local):
    """A thread's handles, one a device, and its graphs; None for a task that cuDNN has no graph for."""

    def __init__(self) -> None:
        self._handles: dict[torch.device, Any] = {}
        self._graphs: dict[ConvTask, _Graph | None] = {}

    def handle(self, device: torch.device) -> Any:
        """The device's handle, on its current stream."""
        cudnn = import_module("cudnn")
        if device not in self._handles:
            self._handles[device] = cudnn.create_handle()
        if device.type == "cuda":
            cudnn.set_stream(handle=self._handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
        return self._handles[device]

    def graph(self, task: ConvTask) -> _Graph | None:
        if task not in self._graphs:
            if missing := engines_missing():
                raise RuntimeError(f"an engine plan of cuDNN was asked for, and {missing}")
            try:
                self._graphs[task] = _Graph(task, self.handle(task.device))
            except import_module("cudnn").cudnnGraphNotSupportedError:
                self._graphs[task] = None
        return self._graphs[task]


_LOCAL = _Local()
