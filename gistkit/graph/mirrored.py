"""Autocast of another device, followed by the CPU whose operators a capture of it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class MirroredAutocast(TorchFunctionMode):
    """While it is on, CPU tensors are cast where those of ``device_type`` would be: in contexts around it and in those
    that the model enters itself. CPU autocast is afterwards what it was."""

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


__all__ = ["MirroredAutocast", "autocast_device"]
