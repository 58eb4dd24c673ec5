"""Convolution algorithms as planner data: seconds and workspace of each, from the shape and the device. Pure data.

vDNN (section III-C, footnote 2) and moDNN (section IV-A) ask cuDNN for every algorithm's time and workspace; PyTorch
lists no algorithms and picks none by layer, so here both come from theory, and a measured time of the default scales
them (``cost_table(measured_s=...)``). Where a step cannot be told its algorithms (``Hardware.tells_algorithms``) the
default is all there is.

| algorithm | time | workspace |
|---|---|---|
| implicit_precomp_gemm | the roofline; taken as PyTorch's | 4 bytes a filter element and output pixel; NHWC copies |
| implicit_gemm | 1 / 0.7: offsets are computed for every tile | 0 |
| gemm | unrolled input written and read besides | the unrolled input of one image |
| winograd | F(2x2, 3x3): 2.25 times fewer products at 0.65 of the rate | filters; a weight gradient: both maps too |
| fft | complex products, one a frequency, and spectra moved | spectra of input, filter and output |
| fft_tiling | the same over tiles of 32x32 | the same over tiles |

On tensor cores (a device with ``tf32``) cuDNN brings NCHW maps into NHWC and back. That takes time (:func:`layout_s`)
and the default needs both maps a second time. On an H200 (torch 2.11, fp32, batch 64) 3x3 filters had both copies
(VGG-16 conv1_2: 1,563 to 1,568 of 1,568 MiB), some 1x1 filters on large maps less than half of them; they are counted
for all, too much by 3 to 12 % of such a peak and never too little.

The other algorithms run at the rate of the fp32 units and convert nothing. Winograd, fft and fft_tiling need stride 1
and no dilation, winograd 3x3 filters. The efficiencies 0.7, 0.65 and 0.8 are chosen, not measured by algorithm. With
them the fastest algorithms take 92 ms for AlexNet and 462 ms for GoogLeNet (batch 128) on a Titan X, where cuDNN 4 took
81 and 470 ms (convnet-benchmarks).

A plan names a call's algorithms in one text: ``winograd`` for all of its tasks, or one for each task by its part or
phase, ``forward=winograd,weight=fft,input=implicit_gemm``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gistkit.formats import ceil_div
from gistkit.ir import ConvShape, Task
from gistkit.planning.cost.devices import Hardware

DEFAULT = "implicit_precomp_gemm"
"""What PyTorch is taken to run."""
IMPLICIT_GEMM_RATE, FFT_RATE = 0.7, 0.8
WINOGRAD_RATE, WINOGRAD_SAVING = 0.65, 2.25
FFT_LARGEST, FFT_TILE = 256, 32
"""Greatest height and width, padding included, that cuDNN's fft takes; the side of a tile."""
_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Algorithm:
    """One way to run a task: seconds, and the bytes it needs beside its reads and writes while it runs."""

    name: str
    seconds: float
    workspace_bytes: int


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


def layout_s(task: Task, hardware: Hardware) -> float:
    """Seconds in which a convolution's maps are brought into NHWC and back: two passes over each."""
    return 2 * layout_bytes(task, hardware) / (hardware.memory_gbps * 1e9)


def layout_bytes(task: Task, hardware: Hardware) -> int:
    """Bytes of the NHWC copies of a convolution's two maps or their gradients, 0 where the device has no ``tf32``."""
    shape = task.conv
    if shape is None or "tf32" not in hardware.flops or task.dtype == "float64":
        return 0
    elements = shape.n * (shape.c * shape.h * shape.w + shape.k * shape.out_h * shape.out_w)
    return elements * _ITEMSIZE.get(task.dtype, 4)


def conv_algorithms(task: Task, hardware: Hardware) -> tuple[Algorithm, ...]:
    """The algorithms of a convolution's task (forward, ``weight`` or ``input``) that a step can be told, the default
    first. A device without asynchronous counts (a CPU) has ``direct`` alone, without workspace."""
    shape = task.conv
    assert shape is not None
    rate = arithmetic_rate(hardware, task.dtype, conv=True)
    bandwidth = hardware.memory_gbps * 1e9

    def roofline(flops_s: float, moved_bytes: float) -> float:
        return max(flops_s, moved_bytes / bandwidth, hardware.launch_s)

    plain_s = task.flops / rate
    if not hardware.async_counts:
        return (Algorithm("direct", roofline(plain_s, task.moved_bytes), 0),)
    offsets_bytes = 4 * (shape.c // shape.groups * math.prod(shape.kernel) + shape.out_h * shape.out_w)
    default_s = layout_s(task, hardware) + roofline(plain_s, task.moved_bytes)
    default = Algorithm(DEFAULT, default_s, offsets_bytes + layout_bytes(task, hardware))
    if not hardware.tells_algorithms:
        return (default,)
    simt = hardware.flops["float32"]
    simt_s = task.flops / simt if layout_bytes(task, hardware) else plain_s
    found = [default, Algorithm("implicit_gemm", roofline(simt_s / IMPLICIT_GEMM_RATE, task.moved_bytes), 0)]
    unrolled_bytes = _unrolled_bytes(shape, task.dtype)
    if unrolled_bytes:
        moved_bytes = task.moved_bytes + 2 * shape.n * unrolled_bytes
        found.append(Algorithm("gemm", roofline(simt_s, moved_bytes), unrolled_bytes))
    if shape.kernel == (3, 3) and _plain(shape):
        seconds = task.flops / WINOGRAD_SAVING / (simt * WINOGRAD_RATE)
        workspace_bytes = _winograd_bytes(shape, task.part)
        found.append(Algorithm("winograd", roofline(seconds, task.moved_bytes + 2 * workspace_bytes), workspace_bytes))
    fits = _plain(shape) and min(shape.kernel) > 1
    for name, transform in (("fft", _whole(shape)), ("fft_tiling", _tiles(shape))):
        if fits and transform is not None:
            flops, spectra_bytes = transform
            seconds = flops / (simt * FFT_RATE) + (task.moved_bytes + 2 * spectra_bytes) / bandwidth
            found.append(Algorithm(name, max(seconds, hardware.launch_s), spectra_bytes))
    return tuple(a for a in found if a.name not in hardware.lacks)


def _unrolled_bytes(shape: ConvShape, dtype: str) -> int:
    """im2col of one image; 0 where the image is that matrix already."""
    if math.prod(shape.kernel) == 1 and shape.stride == (1, 1):
        return 0
    return shape.c * math.prod(shape.kernel) * shape.out_h * shape.out_w * _ITEMSIZE.get(dtype, 4)


def _winograd_bytes(shape: ConvShape, part: str) -> int:
    """F(2x2, 3x3): 16 fp32 numbers a filter; a weight gradient transforms the 4x4 tiles of both maps as well."""
    filters = shape.c * shape.k
    tiles = shape.n * ceil_div(shape.out_h, 2) * ceil_div(shape.out_w, 2) * (shape.c + shape.k)
    return 64 * (filters + (tiles if part == "weight" else 0))


def _plain(shape: ConvShape) -> bool:
    return shape.stride == (1, 1) and shape.dilation == (1, 1) and shape.groups == 1


def _whole(shape: ConvShape) -> tuple[float, int] | None:
    sides = shape.out_h + shape.kernel[0] - 1, shape.out_w + shape.kernel[1] - 1
    if max(sides) > FFT_LARGEST:
        return None
    height, width = (1 << max(1, (side - 1).bit_length()) for side in sides)
    return _spectra(shape, height, width, 1)


def _tiles(shape: ConvShape) -> tuple[float, int] | None:
    """Transforms of overlapping tiles, each good for tile - kernel + 1 outputs a side."""
    if max(shape.kernel) > FFT_TILE // 2:
        return None
    rows = ceil_div(shape.out_h, FFT_TILE - shape.kernel[0] + 1)
    columns = ceil_div(shape.out_w, FFT_TILE - shape.kernel[1] + 1)
    return _spectra(shape, FFT_TILE, FFT_TILE, rows * columns)


def _spectra(shape: ConvShape, height: int, width: int, tiles: int) -> tuple[float, int]:
    """The operations of an fft convolution and the bytes of all its spectra. A real transform keeps width / 2 + 1
    columns of complex fp32. One complex multiply-add is 8 operations, a real transform of P points 2.5 P log2(P)."""
    frequencies = height * (width // 2 + 1)
    maps, filters = shape.n * tiles * (shape.c + shape.k), shape.c * shape.k
    points = height * width
    products = 8.0 * frequencies * shape.n * tiles * filters
    transforms = 2.5 * points * math.log2(points) * (maps + filters)
    return products + transforms, 8 * frequencies * (maps + filters)
