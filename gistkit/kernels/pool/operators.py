"""Max-pool launchers: the geometry picks a kernel, everything known per layer becomes a compile-time constant.

| pass | kernel | where |
|---|---|---|
| forward | `forward_pairs_kernel` | NCHW, 2x2 or 3x3 windows of stride 2, even output width |
| forward | `forward_kernel` | everything else |
| backward | `backward_pairs_kernel` | as above, but 3x3 only with padding 1, and width = 2 out_width |
| backward | `backward_quads_kernel` | stride 2, windows of up to 25 positions |
| backward | `backward_kernel` | everything else |

Where PyTorch's own kernels differ, these follow CUDA's, but for what docs/kernels.md, "Surprises", has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from gistkit import formats
from gistkit.kernels.launch.tiling import launch
from gistkit.kernels.layout import is_channels_last, maps_like
from gistkit.kernels.pool.backward import backward_kernel, backward_pairs_kernel, backward_quads_kernel
from gistkit.kernels.pool.forward import forward_kernel, forward_pairs_kernel
from gistkit.kernels.pool.geometry import PoolGeometry, backward_geometry, forward_geometry, none_code
from gistkit.kernels.pool.tiles import divisor
from gistkit.kernels.signed_zero import relu_keeps_negative_zero
from gistkit.kernels.warp.lanes import asm_level

FORWARD_OUTPUTS = 1024
PAIRS = 512
PIXELS = 1024
QUADS = 1024
UNROLLED_POSITIONS = 9
QUADS_POSITIONS = 25


def maxpool_forward(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool, relu: bool,
    zero_code: bool, bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Max-pool of x (or of relu(x), in one pass) and one code per output: as :func:`..reference.pool.maxpool_forward`,
    with ``torch.relu``'s -0.0 on x's device. Does not synchronise but to ask for that, once."""
    g = forward_geometry(x, kernel, stride, padding, ceil_mode)
    keep_zero = relu_keeps_negative_zero(x) if relu else False
    channels_last = is_channels_last(x)
    y = maps_like(x, g.out_height, g.out_width, channels_last)
    codes = torch.empty((formats.argmax_bytes(y.numel(), bits),), dtype=torch.uint8, device=x.device)
    if y.numel() == 0:
        return y, codes
    flags = {"RELU": relu, "KEEP_ZERO": keep_zero, "ZERO_CODE": zero_code, "NONE": none_code(bits), "BITS": bits}
    flags["ASM"] = _assembly_level(x)
    for outputs, positions, inputs in _parts(g, codes, bits, y, x):
        if _runs_in_pairs(g, channels_last):
            _launch_pairs(inputs, outputs, positions, g, flags)
        else:
            _launch_forward(inputs, outputs, positions, g, channels_last, flags)
    return y, codes


def maxpool_backward(
    grad_y: torch.Tensor, codes: torch.Tensor, height: int, width: int, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], channels_last: bool, zero_code: bool, bits: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the pool's input: as :func:`..reference.pool.maxpool_backward`, but sums are fp32 as on CUDA.
    Copies grad_y where it is not in the layout that ``channels_last`` names. Does not synchronise."""
    g = backward_geometry(grad_y, height, width, kernel, stride, padding)
    grad_y = grad_y.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    grad_x = maps_like(grad_y, height, width, channels_last)
    if grad_x.numel() == 0:
        return grad_x
    unpadded = (g.kernel, g.padding) == ((3, 3), (0, 0))
    for part in _parts(g, codes, bits, grad_y, grad_x):
        if _runs_in_pairs(g, channels_last) and 2 * g.out_width == g.width and not unpadded:
            _launch_backward_pairs(*part, g, bits)
        elif g.stride == (2, 2) and g.positions <= QUADS_POSITIONS:
            _launch_quads(*part, g, channels_last, bits)
        else:
            _launch_backward(*part, g, channels_last, bits)
    return grad_x


def _assembly_level(x: torch.Tensor) -> int:
    """Whose instructions a kernel's assembly may use: 90 for sm_90 and later, 80 for sm_80 to sm_89, 0 for none."""
    level = asm_level(x)
    return 90 if level >= 90 else 80 if level >= 80 else 0


def _windows(g: PoolGeometry) -> dict[str, Any]:
    pairs = {"K": g.kernel, "S": g.stride, "P": g.padding}
    return {name + axis: pair[i] for name, pair in pairs.items() for i, axis in enumerate("HW")}


def _parts(g: PoolGeometry, codes: torch.Tensor, bits: int, y: torch.Tensor, x: torch.Tensor) -> list[tuple]:
    """(outputs, codes, inputs) of as many images as one launch takes."""
    images, outputs = y.shape[0], y[0].numel()
    if images <= g.images:
        return [(y, codes, x)]
    starts = range(0, images, g.images)
    return [(y[i : i + g.images], codes[i * outputs * bits // 8 :], x[i : i + g.images]) for i in starts]


def _runs_in_pairs(g: PoolGeometry, channels_last: bool) -> bool:
    return (
        not channels_last
        and (g.kernel, g.padding) in (((2, 2), (0, 0)), ((3, 3), (0, 0)), ((3, 3), (1, 1)))
        and g.stride == (2, 2)
        and g.out_width % 2 == 0
        and 2 * g.out_width <= g.width
    )


def _launch_pairs(x, y, codes, g: PoolGeometry, flags: dict[str, Any]) -> None:
    pairs = y.numel() // 2
    align = math.gcd(g.width, 4)
    launch(
        forward_pairs_kernel, formats.ceil_div(pairs, PAIRS), x,
        x, y, codes, pairs, g.out_width // 2, g.height, g.width // align, g.out_height,
        divisor(g.out_width // 2), divisor(g.out_height),
        K=g.kernel[0], P=g.padding[0], CHECK=g.last(0) >= g.height, ALIGN=align, LANES=PAIRS,
        **flags,
    )  # fmt: skip


def _launch_forward(x, y, codes, g: PoolGeometry, channels_last: bool, flags: dict[str, Any]) -> None:
    inner = x.shape[1] if channels_last else g.out_width
    v = math.gcd(inner, 16 // x.element_size() if channels_last else 2)
    groups = y.numel() // v
    lanes = FORWARD_OUTPUTS // v
    check = max(g.padding) > 0 or g.last(0) >= g.height or g.last(1) >= g.width
    launch(
        forward_kernel, formats.ceil_div(groups, lanes), x,
        x, y, codes, groups, inner // v, g.height, g.width, g.out_height, g.out_width,
        divisor(inner // v), divisor(g.out_width), divisor(g.out_height),
        CHANNELS_LAST=channels_last, CHECK=check, UNROLL=g.positions <= UNROLLED_POSITIONS, V=v, LANES=lanes,
        **_windows(g), **flags,
    )  # fmt: skip


def _launch_backward_pairs(grad_y, codes, grad_x, g: PoolGeometry, bits: int) -> None:
    quad_height, row_pairs = formats.ceil_div(g.height, 2), g.out_width // 2
    pairs = grad_x.shape[0] * grad_x.shape[1] * quad_height * row_pairs
    launch(
        backward_pairs_kernel, formats.ceil_div(pairs, PAIRS), grad_y,
        grad_y, codes, grad_x, pairs, row_pairs, g.height, g.out_height, quad_height,
        divisor(row_pairs), divisor(quad_height),
        K=g.kernel[0], BITS=bits, CHECK=quad_height > g.out_height, ODD=g.height % 2 == 1,
        PORTABLE=not grad_x.is_cuda, LANES=PAIRS,
    )  # fmt: skip


def _launch_quads(grad_y, codes, grad_x, g: PoolGeometry, channels_last: bool, bits: int) -> None:
    n, c = grad_y.shape[:2]
    v = math.gcd(c, 16 // grad_y.element_size()) if channels_last else 1
    quad_height, quad_width = formats.ceil_div(g.height, 2), formats.ceil_div(g.width, 2)
    groups = n * c * quad_height * quad_width // v
    lanes = QUADS // v
    windows = {name: value for name, value in _windows(g).items() if not name.startswith("S")}
    launch(
        backward_quads_kernel, formats.ceil_div(groups, lanes), grad_y,
        grad_y, codes, grad_x, groups, c // v, g.height, g.width, g.out_height, g.out_width, quad_height, quad_width,
        divisor(c // v), divisor(quad_width), divisor(quad_height),
        CHANNELS_LAST=channels_last, BITS=bits, PORTABLE=not grad_x.is_cuda,
        CHECK=_quads_need_check(g, quad_height, quad_width), ODD=g.height % 2 == 1 or g.width % 2 == 1,
        V=v, LANES=lanes, **windows,
    )  # fmt: skip


def _quads_need_check(g: PoolGeometry, quad_height: int, quad_width: int) -> bool:
    """True where some quad looks at an output row or column that does not exist."""
    sizes = ((quad_height, g.out_height), (quad_width, g.out_width))
    return any(
        k - 1 - p >= 2 or quads - 1 + (p + 1) // 2 >= outputs
        for (quads, outputs), k, p in zip(sizes, g.kernel, g.padding, strict=True)
    )


def _launch_backward(grad_y, codes, grad_x, g: PoolGeometry, channels_last: bool, bits: int) -> None:
    c = grad_x.shape[1]
    v = math.gcd(c, 16 // grad_y.element_size()) if channels_last else 1
    groups = grad_x.numel() // v
    lanes = PIXELS // v
    launch(
        backward_kernel, formats.ceil_div(groups, lanes), grad_y,
        grad_y, codes, grad_x, groups, c // v, g.height, g.width, g.out_height, g.out_width,
        divisor(c // v), divisor(g.width), divisor(g.height),
        CHANNELS_LAST=channels_last, BITS=bits, PORTABLE=not grad_x.is_cuda, V=v, LANES=lanes,
        **_windows(g),
    )  # fmt: skip
