"""The host's memory: how much of it is free, how PyTorch says that there is too little, and pinned memory. That cannot
be swapped out, so too much of it ends the process, or another one.

:func:`pin` maps exactly the bytes that are wanted, near the device: PyTorch's own pinned allocator rounds up to a power
of two and touches the pages from whatever core it runs on. Here a thread that stays on the device's NUMA node meanwhile
touches them, before they are registered with CUDA.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from gistkit.errors import HostMemoryError

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


PAGE_BYTES = 2**21
PROBE_BYTES = 512
_CHECKED: set[torch.device] = set()
"""Devices that have written to pinned memory and read it: a step that pins more of it does not wait."""


def pin(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8[nbytes] that CUDA can address; the first of a device is checked by a small copy there and back, which waits
    for the current stream. Slow: 0.1 to 0.5 s a GB.

    Raises HostMemoryError where the system has no such memory or does not let it be
    pinned.
    """
    try:
        pages = mmap.mmap(-1, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(nbytes, f"the system maps no such memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    with _near(device):
        np.frombuffer(pages, np.uint8)[:: mmap.PAGESIZE] = 0  # in this thread, not in PyTorch's
    with torch.cuda.device(device):
        code = _runtime().cudaHostRegister(memory.data_ptr(), nbytes, 0)
    if int(code) != 0:
        with suppress(RuntimeError):
            torch.zeros(1, device=device)  # takes CUDA's last error away, which the next launch would raise
        raise HostMemoryError(nbytes, f"CUDA does not pin it: {code}; raise the limit of locked memory (ulimit -l)")
    if device not in _CHECKED:
        if not _written_and_read(memory[:PROBE_BYTES], device):
            unpin(memory)
            raise HostMemoryError(nbytes, f"what {device} writes there does not come back")
        _CHECKED.add(device)
    return memory


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`; no copy from or to the memory may be left. The pages go with the last tensor on them."""
    _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()


def _written_and_read(memory: torch.Tensor, device: torch.device) -> bool:
    expected = torch.arange(memory.numel(), device=device).to(torch.uint8)
    memory.copy_(expected, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    return memory.is_pinned() and torch.equal(memory.to(device), expected)


@contextmanager
def _near(device: torch.device) -> Iterator[None]:
    """This thread on the cores of the device's NUMA node, where the system tells which these are."""
    cores = device_cores(device)
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores & before or before)
        yield
    finally:
        os.sched_setaffinity(0, before)


def device_cores(device: torch.device, pci: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Cores of the NUMA node that a CUDA device hangs on; empty where that is not known."""
    p = torch.cuda.get_device_properties(device)
    try:
        place = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        return cores_of((pci / place / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return set()


def cores_of(text: str) -> set[int]:
    """``0-3,8`` as {0, 1, 2, 3, 8}."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
