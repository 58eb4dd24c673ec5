"""The convolution algorithms of cuDNN's time, each with its seconds and workspace from theory.

vDNN (section III-C, footnote 2) and moDNN (section IV-A) ask cuDNN for them. Given to
``gistkit.planning.cost.table.cost_table(ways=paper_algorithms)``; a measured time of the default scales the others.

| algorithm | time | workspace |
|---|---|---|
| implicit_precomp_gemm | the roofline; taken as PyTorch's | 4 bytes a filter element and output pixel; NHWC copies |
| implicit_gemm | 1 / 0.7: offsets are computed for every tile | 0 |
| gemm | unrolled input written and read besides | the unrolled input of one image |
| winograd | F(2x2, 3x3): 2.25 times fewer products at 0.65 of the rate | filters; a weight gradient: both maps too |
| fft | complex products, one a frequency, and spectra moved | spectra of input, filter and output |
| fft_tiling | the same over tiles of 32x32 | the same over tiles |

All but the first run at the rate of the fp32 units and convert no layouts. Winograd, fft and fft_tiling need stride 1
and no dilation, winograd 3x3 filters. The efficiencies 0.7, 0.65 and 0.8 are chosen, not measured by algorithm. With
them the fastest algorithms take 92 ms for AlexNet and 462 ms for GoogLeNet (batch 128) on a Titan X, where cuDNN 4 took
81 and 470 ms (convnet-benchmarks).
"""

from __future__ import annotations

import math

from gistkit.formats import ceil_div
from gistkit.ir.tasks import ConvShape, Task
from gistkit.planning.cost.algorithms import (
    ITEMSIZE,
    Algorithm,
    arithmetic_rate,
    default_algorithm,
    layout_bytes,
    roofline_s,
)
from gistkit.planning.cost.devices import Hardware
from gistkit.planning.cost.table import task_algorithms

IMPLICIT_GEMM_RATE, FFT_RATE = 0.7, 0.8
WINOGRAD_RATE, WINOGRAD_SAVING = 0.65, 2.25
FFT_LARGEST, FFT_TILE = 256, 32
"""Greatest height and width, padding included, that cuDNN's fft takes; the side of a tile."""
LACKS = {"titanx": ("winograd",)}
"""Winograd came with cuDNN 5; vDNN, whose card that is, had cuDNN 4."""


def paper_algorithms(task: Task, hardware: Hardware) -> tuple[Algorithm, ...]:
    """The algorithms of a task, the default first; of a convolution (forward, ``weight`` or ``input``) all that cuDNN
    had, on a GPU."""
    shape = task.conv
    if shape is None or not hardware.async_counts:
        return task_algorithms(task, hardware)

    def roofline(flops_s: float, moved_bytes: float) -> float:
        return roofline_s(flops_s, moved_bytes, hardware)

    simt = hardware.flops["float32"]
    slower = layout_bytes(task, hardware) > 0
    simt_s = task.flops / (simt if slower else arithmetic_rate(hardware, task.dtype, conv=True))
    found = [default_algorithm(task, hardware)]
    found.append(Algorithm("implicit_gemm", roofline(simt_s / IMPLICIT_GEMM_RATE, task.moved_bytes), 0))
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
            seconds = flops / (simt * FFT_RATE) + (task.moved_bytes + 2 * spectra_bytes) / (hardware.memory_gbps * 1e9)
            found.append(Algorithm(name, max(seconds, hardware.launch_s), spectra_bytes))
    return tuple(a for a in found if a.name not in LACKS.get(hardware.name, ()))


def _unrolled_bytes(shape: ConvShape, dtype: str) -> int:
    """im2col of one image; 0 where the image is that matrix already."""
    if math.prod(shape.kernel) == 1 and shape.stride == (1, 1):
        return 0
    return shape.c * math.prod(shape.kernel) * shape.out_h * shape.out_w * ITEMSIZE.get(dtype, 4)


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
