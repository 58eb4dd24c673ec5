"""How much of the host's memory is free, and how PyTorch says that there is too little. Pinned memory cannot be swapped
out, so too much of it ends the process, or another one."""

from __future__ import annotations

from pathlib import Path

import torch

_KIB = 1024
NOT_FITTING = (
    "unable to find an engine",  # cuDNN, FIND or GET
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "out of memory",
    "can't allocate memory",  # PyTorch's allocator of a CPU
    "not enough memory",
)
"""Parts of the texts with which PyTorch says that something does not fit."""


def does_not_fit(error: BaseException) -> bool:
    """Whether an error says that a device or the host has too little memory for something."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NOT_FITTING)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process can take without swapping, by the kernel's word; 0 where it says nothing.

    The least of ``MemAvailable`` and of what a container's limit leaves (version 2 of control groups, or 1). Pages of
    files that are not in use count as free there, as they do in ``MemAvailable``.
    """
    free = _KIB * (_listed(proc / "meminfo", "MemAvailable:") or 0)
    free = min(free, _left(cgroups, "memory.max", "memory.current", "inactive_file", free))
    free = min(
        free, _left(cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", free)
    )
    return max(0, free)


def _left(group: Path, limit: str, used: str, reclaimable: str, otherwise: int) -> int:
    """What a group's limit leaves; ``otherwise`` where it has none."""
    try:
        taken = int((group / used).read_text()) - (_listed(group / "memory.stat", reclaimable) or 0)
        return int((group / limit).read_text()) - taken
    except (OSError, ValueError):  # ``max`` is no number
        return otherwise


def _listed(path: Path, name: str) -> int | None:
    """The number behind a name in a file of a name and a number a line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


__all__ = ["NOT_FITTING", "available_bytes", "does_not_fit"]
