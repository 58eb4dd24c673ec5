"""Autocast during a capture: the CPU's operators run, under the autocast settings of the device that is planned for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class MirroredAutocast(TorchFunctionMode):
    """While it is active, CPU tensors are cast as tensors of ``device_type`` would be, in autocast contexts around it
    and in those that the model enters. Afterwards CPU autocast is as before."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __enter__(self) -> MirroredAutocast:
        self._before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._follow()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._set(*self._before)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._follow()
        return func(*args, **(kwargs or {}))

    def _follow(self) -> None:
        self._set(torch.is_autocast_enabled(self._device_type), torch.get_autocast_dtype(self._device_type))

    @staticmethod
    def _set(enabled: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)


def autocast_device(tensors: Iterable[torch.Tensor]) -> str | None:
    """The type of the device, not the CPU, whose autocast is meant for a step on ``tensors``; None where it is the
    CPU's own. Tensors on the meta device stand for CUDA's while CUDA's autocast is on, else for the CPU's."""
    found = next((t.device.type for t in tensors if t.device.type != "cpu"), None)
    if found == "meta":
        return "cuda" if torch.is_autocast_enabled("cuda") else None
    return found


@contextmanager
def left_behind() -> Iterator[None]:
    """As in a loop that has left its autocast context, whose cache of casts goes then: what is cast within lives no
    longer than its readers or a context entered within (a checkpoint's, whose forward runs again in backward). Whether
    autocast is on stays. Costs about 1 us."""
    depth = torch.autocast_increment_nesting()
    _nest(-depth)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        _nest(depth - 1)


def _nest(deeper: int) -> None:
    """Enter, or leave, so many contexts as far as the cache is concerned."""
    for _ in range(abs(deeper)):
        torch.autocast_increment_nesting() if deeper > 0 else torch.autocast_decrement_nesting()
