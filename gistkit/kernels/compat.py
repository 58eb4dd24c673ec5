"""The private names of torch and Triton that the kernels' launches use. They hold for the releases that the project
names; a newer one is to be looked at here.

*Launching.* Triton's ``CudaLauncher.__call__`` asks allocators for scratch that few kernels have, 3 us a launch, and
hands on to a function of C. Where a kernel has none, that function is called as the releases below call it; else, and
in any other release, the launcher itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

without_torch_functions: Any = torch._C.DisableTorchFunction
"""A context in which what watches the caller's PyTorch functions sees nothing."""
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]
"""How many dispatch modes are active."""
# a build of PyTorch without CUDA has neither
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
_captures: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


def torch_stream(handle: int, device: int) -> torch.cuda.Stream:
    """PyTorch's form of a stream of that device. ``ExternalStream(0)`` is not the default stream but any of a pool."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a CUDA graph. Makes no CUDA context."""
    return torch.cuda.is_initialized() and _captures()


class Launcher(NamedTuple):
    """Called with (programs, 1, 1, stream, ``function``, *``before``, the kernel's arguments, a tuple if ``boxed``)."""

    launch: Callable[..., Any]
    function: int
    before: tuple
    boxed: bool


def launcher_of(run: Any, function: int, metadata: Any) -> Launcher:
    """The launcher of a compiled kernel, of whose ``CompiledKernel`` these are attributes (``packed_metadata``)."""
    import triton  # not before the first launch

    nothing = (None, None, None)  # launch metadata and the two hooks
    release = ".".join(triton.__version__.split(".")[:2])
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return Launcher(run, function, (metadata, *nothing), False)
    how, scratch = (run.launch_cooperative_grid, run.launch_pdl), (None, None)
    if release == "3.6":
        return Launcher(run.launch, function, (*how, *scratch, metadata, *nothing), False)
    if release == "3.9" and not run.gsan_enabled:
        before = (*how, metadata, *nothing, *scratch, run.arg_annotations, run.kernel_signature)
        return Launcher(run.launch, function, before, True)
    return Launcher(run, function, (metadata, *nothing), False)
