"""A launch that comes again with other tensors of the same kind: everything but their addresses is ready.

:func:`gistkit.kernels.launch.tiling.launch` tells by dtypes, numbers and constants which compiled kernel is meant,
which takes a step of many small layers as long as the launch itself. Who launches for tensors of one kind again and
again says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gistkit.kernels import compat
from gistkit.kernels.launch.tiling import NUM_WARPS, ROWS, launch, launch_here


class Ready:
    """Launches of ``kernel`` on the device of that number, with these constants; the tensors' dtypes are always the
    same. Programs and numbers (the arguments after the tensors) may differ where the kernel specialises on none."""

    __slots__ = ("_constexprs", "_device", "_found", "_kernel", "_num_warps", "_rest", "_wide")

    def __init__(self, kernel: Any, device: int, num_warps: int = NUM_WARPS, **constexprs: Any) -> None:
        self._kernel, self._device, self._num_warps, self._constexprs = kernel, device, num_warps, constexprs
        self._found: tuple = ()
        self._rest: tuple = ()
        self._wide: list[int] = []

    def at(self, programs: int, addresses: Sequence[int], numbers: Sequence[int]) -> bool:
        """Launch for tensors at these addresses; False, and nothing done, where the first launch is still to come, an
        address is no multiple of 16, or another device is the current one."""
        odd = 0
        for address in addresses:
            odd |= address
        device = self._device
        if odd & 15 or not self._found or device != compat.current_device():
            return False
        if self._wide != [n >> 31 for n in numbers]:
            return False
        run, function, before, boxed = self._found
        stream = compat.current_stream(device)
        if boxed:
            run(programs, 1, 1, stream, function, *before, (*addresses, *numbers, *self._rest))
        else:
            run(programs, 1, 1, stream, function, *before, *addresses, *numbers, *self._rest)
        return True

    def first(self, programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """Launch for these tensors, however they lie."""
        args = (*tensors, *numbers)
        if self._device < 0:  # the interpreter
            launch(self._kernel, programs, tensors[0], *args, num_warps=self._num_warps, **self._constexprs)
            return
        with torch.cuda.device(self._device):
            found = launch_here(self._kernel, programs, self._device, self._num_warps, args, self._constexprs)
        if not any(t.data_ptr() & 15 for t in tensors):
            self._rest, self._wide = found[2], [n >> 31 for n in numbers]
            self._found = found[1]


class Repeated:
    """:class:`Ready` launches by so many programs with the same numbers every time."""

    __slots__ = ("_numbers", "_programs", "_ready")

    def __init__(
        self, kernel: Any, programs: int, device: int, numbers: tuple, num_warps: int = NUM_WARPS, **constexprs: Any
    ) -> None:
        self._ready = Ready(kernel, device, num_warps, **constexprs)
        self._programs, self._numbers = programs, numbers

    def at(self, *addresses: int) -> bool:
        """:meth:`Ready.at`."""
        return self._ready.at(self._programs, addresses, self._numbers)

    def first(self, *tensors: torch.Tensor) -> None:
        """:meth:`Ready.first`."""
        self._ready.first(self._programs, tensors, self._numbers)


def repeated_tiles(kernel: Any, x: torch.Tensor, **constexprs: Any) -> Repeated:
    """:func:`gistkit.kernels.launch.tiling.launch_tiles` for tensors of x's kind."""
    n, rows = x.numel(), ROWS[x.element_size()]
    return Repeated(kernel, -(-n // (rows * 8)), x.get_device(), (n,), ROWS=rows, ALIGNED=n % 8 == 0, **constexprs)
