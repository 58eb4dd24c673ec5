"""How much of the host's memory is free, how PyTorch says that there is too little, and pinned memory for kernels. It
cannot be swapped out, so too much of it ends the process, or another one."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

NOT_FITTING = (
    "unable to find an engine",  # cuDNN, FIND or GET
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "out of memory",
    "can't allocate memory",  # PyTorch's allocator of a CPU
    "not enough memory",
)
"""Parts of the texts with which PyTorch says that something does not fit."""
COPIED_BYTES = 512


def does_not_fit(error: BaseException) -> bool:
    """Whether an error says that a device or the host has too little memory for something."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NOT_FITTING)


def available_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process can take without swapping.

    The least of what the machine has available and of what a container's limit leaves (version 2 of control groups, or
    1). Pages of files that are not in use count as free in both.
    """
    free = psutil.virtual_memory().available
    for group, limit, used, reclaimable in (
        (cgroups, "memory.max", "memory.current", "inactive_file"),
        (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken = int((group / used).read_text()) - int(statistics.get(reclaimable, 0))
            free = min(free, int((group / limit).read_text()) - taken)
        except (OSError, ValueError):  # no such group, or its limit is ``max``
            continue
    return max(0, free)


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Pinned host memory (uint8) for kernels on the device's current stream to write to. Raises RuntimeError where
    there is none.

    PyTorch's allocator knows a stream that uses a block by its copies alone, and would hand a block that was let go of
    to others while kernels still write to it. One small copy out of the block tells it: what is let go of then waits
    for an event that is recorded on that stream at that moment.
    """
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    few_bytes = min(nbytes, COPIED_BYTES)
    torch.empty(few_bytes, dtype=torch.uint8, device=device).copy_(memory[:few_bytes], non_blocking=True)
    return memory
