"""A launch that comes again with other tensors of the same kind: everything but their addresses is ready.

:func:`gistkit.kernels.launch.tiling.launch` tells by dtypes, numbers and constants which compiled kernel is meant,
which takes
a step of many small layers as long as the launch itself. Who launches for tensors of one kind again and again says so.
"""

from __future__ import annotations

from typing import Any

import torch

from gistkit.kernels import compat
from gistkit.kernels.launch.tiling import NUM_WARPS, ROWS, launch_here


class Repeated:
    """Launches of ``kernel`` by so many programs on the device of that number. ``numbers``: the arguments after the
    tensors; the tensors' dtypes are always the same."""

    __slots__ = ("_constexprs", "_device", "_found", "_kernel", "_num_warps", "_numbers", "_programs", "_rest")

    def __init__(
        self, kernel: Any, programs: int, device: int, numbers: tuple, num_warps: int = NUM_WARPS, **constexprs: Any
    ) -> None:
        self._kernel, self._programs, self._device, self._num_warps = kernel, programs, device, num_warps
        self._numbers, self._constexprs = numbers, constexprs
        self._found: tuple = ()
        self._rest: tuple = ()

    def at(self, *addresses: int) -> bool:
        """Launch for tensors at these addresses; False, and nothing done, where the first launch is still to come, an
        address is no multiple of 16, or another device is the current one."""
        odd = 0
        for address in addresses:
            odd |= address
        device = self._device
        if odd & 15 or not self._found or device != compat.current_device():
            return False
        run, function, before, boxed = self._found
        stream = compat.current_stream(device)
        if boxed:
            run(self._programs, 1, 1, stream, function, *before, (*addresses, *self._rest))
        else:
            run(self._programs, 1, 1, stream, function, *before, *addresses, *self._rest)
        return True

    def first(self, *tensors: torch.Tensor) -> None:
        """Launch for these tensors, however they lie."""
        with torch.cuda.device(self._device):
            args = (*tensors, *self._numbers)
            found = launch_here(self._kernel, self._programs, self._device, self._num_warps, args, self._constexprs)
        if not any(t.data_ptr() & 15 for t in tensors):
            self._rest = (*self._numbers, *found[2])
            self._found = found[1]


def repeated_tiles(kernel: Any, x: torch.Tensor, **constexprs: Any) -> Repeated:
    """:func:`gistkit.kernels.launch.tiling.launch_tiles` for tensors of x's kind."""
    n, rows = x.numel(), ROWS[x.element_size()]
    return Repeated(kernel, -(-n // (rows * 8)), x.get_device(), (n,), ROWS=rows, ALIGNED=n % 8 == 0, **constexprs)
