"""Tiles of [ROWS, 8] elements over a flat tensor, and the launch that covers it with them.

A lane then holds 8 neighbours in registers: one 16-byte access of a 16-bit type, two of fp32, one byte of a 1-bit mask.

:func:`launch` tells by dtypes, numbers and constants which compiled kernel is meant, which takes a step of many small
layers as long as the launch itself. Who launches for tensors of one kind again and again keeps a :class:`Ready`, of
which everything but the addresses is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from gistkit.kernels import compat

# rows a program, by bytes an element of the widest tensor: 64 bytes of values a lane, so several accesses are in flight
ROWS = {1: 512, 2: 512, 4: 256}
NUM_WARPS = 4


@triton.jit
def span(n, SIZE: tl.constexpr):
    """(first element of this program's SIZE, how many of them are in bounds): int64 and int32. Offsets within a program
    stay int32, so that only its base address is 64-bit arithmetic."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    return first, tl.minimum(n - first, SIZE).to(tl.int32)


@triton.jit
def tile(n, ROWS: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr = 8):
    """(first element, rows, rows in bounds, elements, elements in bounds); rows and elements count from the first.
    ALIGNED says that n is a multiple of COLUMNS: the bounds check is then per row and leaves wide accesses possible."""
    first, count = span(n, ROWS * COLUMNS)
    rows = tl.arange(0, ROWS)
    offs = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row_mask = rows * COLUMNS < count
    if ALIGNED:
        mask = tl.broadcast_to(row_mask[:, None], (ROWS, COLUMNS))
    else:
        mask = offs < count
    return first, rows, row_mask, offs, mask


def launch(
    kernel: Any, programs: int, x: torch.Tensor, *args: Any, num_warps: int = NUM_WARPS, **constexprs: Any
) -> None:
    """Run kernel on x's device, not at all for 0 programs; products are never contracted into fused multiply-adds."""
    if not programs:
        return
    if not x.is_cuda:  # the interpreter
        kernel[(programs,)](*args, num_warps=num_warps, enable_fp_fusion=False, **constexprs)
    elif x.get_device() == compat.current_device():
        launch_here(kernel, programs, x.get_device(), num_warps, args, constexprs)
    else:
        with torch.cuda.device(x.device):
            launch_here(kernel, programs, x.get_device(), num_warps, args, constexprs)


def launch_here(
    kernel: Any, programs: int, device: int, num_warps: int, args: tuple, constexprs: dict[str, Any]
) -> list:
    """Run kernel on the current device ``device``; what is known of launches of its kind, as :func:`_compiled` has it.
    At every launch Triton binds and specialises the arguments and looks the compiled kernel up: 20 to 30 us of the
    host's time, several times that of the launch itself. So what a kind's first launch has compiled is called directly
    afterwards, as compiled PyTorch calls it, with addresses as numbers (the caller's tensors live on); Triton's launch
    hooks do not see it. A kind is what Triton specialises on, and finer: every tensor's dtype and whether 16 divides
    its address, every integer itself, any other argument's type."""
    kinds: list[Any] = []
    values: list[Any] = []
    odd = 0
    for a in args:
        if type(a) is torch.Tensor or isinstance(a, torch.Tensor):
            address = a.data_ptr()
            odd |= address
            kinds.append(a.dtype)
            values.append(address)
        else:
            kinds.append(a if type(a) is int else type(a))
            values.append(a)
    if odd & 15:
        kinds.append(tuple([isinstance(a, torch.Tensor) and a.data_ptr() & 15 == 0 for a in args]))
    # Kernels count by identity: Triton's own hash of one takes a lock, and is that of its source.
    found = _compiled(id(kernel), device, num_warps, *kinds, *constexprs, *constexprs.values())
    if found:
        _, (run, function, before, boxed), constants = found
        stream = compat.current_stream(device)
        if boxed:
            run(programs, 1, 1, stream, function, *before, (*values, *constants))
        else:
            run(programs, 1, 1, stream, function, *before, *values, *constants)
        return found
    compiled = kernel[(programs,)](*args, num_warps=num_warps, enable_fp_fusion=False, **constexprs)
    constants = tuple([constexprs[name] for name in kernel.arg_names[len(args) :]])
    found.extend((kernel, compat.launcher_of(compiled.run, compiled.function, compiled.packed_metadata), constants))
    return found


@lru_cache(maxsize=4096)
def _compiled(kernel: int, device: int, num_warps: int, *kinds: Any) -> list:
    """[kernel, :class:`gistkit.kernels.compat.Launcher`, constants in the order of the parameters] of the compiled
    kernel; empty until the first launch has filled it. The kernel itself is there so that its id stays its own."""
    return []


def launch_tiles(kernel: Any, x: torch.Tensor, *args: Any, **constexprs: Any) -> None:
    """Run kernel(*args, n, ROWS, ALIGNED, ...) over the tiles of x, whose length and item size fix the grid."""
    n, rows = x.numel(), ROWS[x.element_size()]
    launch(kernel, -(-n // (rows * 8)), x, *args, n, ROWS=rows, ALIGNED=n % 8 == 0, **constexprs)


class Ready:
    """Launches of ``kernel`` on the device of that number, with these constants; the tensors' dtypes are always the
    same, and seen by the kernel as ``dtypes`` where given. Programs and numbers (the arguments after the tensors) may
    differ where the kernel specialises on none."""

    __slots__ = ("_constexprs", "_device", "_dtypes", "_found", "_kernel", "_num_warps", "_rest", "_wide")

    def __init__(
        self,
        kernel: Any,
        device: int,
        num_warps: int = NUM_WARPS,
        dtypes: Sequence[torch.dtype] = (),
        **constexprs: Any,
    ) -> None:
        self._kernel, self._device, self._num_warps, self._constexprs = kernel, device, num_warps, constexprs
        self._dtypes = dtypes
        self._found: tuple = ()
        self._rest: tuple = ()
        self._wide: list[int] = []

    def __call__(self, programs: int, numbers: Sequence[int], *tensors: torch.Tensor) -> None:
        """Launch for these tensors, on the current stream."""
        if not self.at(programs, [t.data_ptr() for t in tensors], numbers):
            seen = zip(tensors, self._dtypes, strict=True) if self._dtypes else ((t, t.dtype) for t in tensors)
            self.first(programs, [t.detach().view(dtype) for t, dtype in seen], numbers)

    def at(
        self, programs: int, addresses: Sequence[int], numbers: Sequence[int], stream: int | None = None
    ) -> bool:  # fmt: skip
        """Launch for tensors at these addresses, on the current stream unless another's handle is given; False, and
        nothing done, where the first launch is still to come, an address is no multiple of 16, or another device is
        the current one."""
        odd = 0
        for address in addresses:
            odd |= address
        device = self._device
        if odd & 15 or not self._found or device != compat.current_device():
            return False
        if self._wide != [n >> 31 for n in numbers]:
            return False
        run, function, before, boxed = self._found
        if stream is None:
            stream = compat.current_stream(device)
        if boxed:
            run(programs, 1, 1, stream, function, *before, (*addresses, *numbers, *self._rest))
        else:
            run(programs, 1, 1, stream, function, *before, *addresses, *numbers, *self._rest)
        return True

    def first(
        self, programs: int, tensors: Sequence[torch.Tensor], numbers: Sequence[int], stream: int | None = None
    ) -> None:  # fmt: skip
        """Launch for these tensors, however they lie."""
        args = (*tensors, *numbers)
        if self._device < 0:  # the interpreter
            launch(self._kernel, programs, tensors[0], *args, num_warps=self._num_warps, **self._constexprs)
            return
        other = None if stream is None else compat.torch_stream(stream, self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(other):
            found = launch_here(self._kernel, programs, self._device, self._num_warps, args, self._constexprs)
        if not any(t.data_ptr() & 15 for t in tensors):
            self._rest, self._wide = found[2], [n >> 31 for n in numbers]
            self._found = found[1]


def repeated_tiles(kernel: Any, x: torch.Tensor, **constexprs: Any) -> partial[None]:
    """:func:`launch_tiles` for tensors of x's kind, which it is called with."""
    n, rows = x.numel(), ROWS[x.element_size()]
    ready = Ready(kernel, x.get_device(), ROWS=rows, ALIGNED=n % 8 == 0, **constexprs)
    return partial(ready, -(-n // (rows * 8)), (n,))
