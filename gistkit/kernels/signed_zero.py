"""What PyTorch's own ReLU makes of -0.0 on a device, which is asked, as it depends on the release: the CPU gives -0.0,
CUDA of torch 2.11 gives +0 (pull request 185354 of 2026 is about -0.0 there). Kernels take the answer as a constant."""

from __future__ import annotations

from functools import cache

import torch

from gistkit.kernels.compat import capturing, without_torch_functions

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def relu_keeps_negative_zero(x: torch.Tensor) -> bool:
    """True where ``torch.relu`` of -0.0 is -0.0 on the device and in the dtype of x, False where it is +0. The first
    call for a device and dtype waits until the current stream has run one element through; none later does. Raises
    RuntimeError where that first call falls into the capture of a CUDA graph."""
    return _ask(x.device, x.dtype)


@cache
def _ask(device: torch.device, dtype: torch.dtype) -> bool:
    # Whatever watches the caller's PyTorch functions has nothing to see here.
    with without_torch_functions():
        if device.type != "cuda":
            return bool(_relu_of_negative_zero(device, dtype))
        with torch.cuda.device(device):
            if capturing():
                raise RuntimeError(
                    f"the first ReLU of {dtype} on {device} asks what PyTorch makes of -0.0 there, which the capture "
                    "of a CUDA graph forbids; run one step before the capture"
                )
            # By an event and pinned memory: .item() would raise under torch.cuda.set_sync_debug_mode("error").
            answer = torch.empty((1,), dtype=_BITS[dtype], device="cpu", pin_memory=True)
            answer.copy_(_relu_of_negative_zero(device, dtype), non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
            return bool(answer)


def _relu_of_negative_zero(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The bits of relu(-0.0), one element: 0 for +0. Built from bits, as a fill with -0.0 may lose the sign."""
    negative_zero = torch.full((1,), torch.iinfo(_BITS[dtype]).min, dtype=_BITS[dtype], device=device).view(dtype)
    return torch.relu(negative_zero).view(_BITS[dtype])
