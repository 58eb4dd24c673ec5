"""cuDNN's two switches for one call of a convolution, as ``torch.backends.cudnn.flags`` sets them for a stretch of a
program, and nothing but these two: its TF32 and its limit of algorithms to try stay as they are.

PyTorch keeps the switches for the process: another thread that runs a convolution meanwhile runs it under them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gistkit.plan.part_algorithms import SWITCHES


@contextmanager
def switched(name: str) -> Iterator[None]:
    """Run under the switches of that name (:data:`gistkit.plan.part_algorithms.SWITCHES`); '' changes nothing."""
    if not name:
        yield
        return
    before = torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()
    _switch(SWITCHES[name])
    try:
        yield
    finally:
        _switch(before)


def _switch(values: tuple[bool, bool]) -> None:
    torch._C._set_cudnn_benchmark(values[0])
    torch._C._set_cudnn_deterministic(values[1])


__all__ = ["switched"]
