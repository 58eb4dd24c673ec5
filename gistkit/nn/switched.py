"""cuDNN's two switches for one call of a convolution, as ``torch.backends.cudnn.flags`` sets them for a stretch of a
program, and nothing but these two: its TF32 and its limit of algorithms to try stay as they are.

PyTorch keeps the switches for the process: another thread that runs a convolution meanwhile runs it under them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gistkit.nn.standin import Geometry
from gistkit.planning.cost import SWITCHES, is_switched, switches


@contextmanager
def switched(name: str) -> Iterator[None]:
    """Run under the switches of that name (:data:`gistkit.planning.cost.part_algorithms.SWITCHES`); '' changes
    nothing."""
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


class SwitchedGeometry(Geometry):
    """A geometry whose gradients are taken under switches, the ones that ``algorithm`` names for each."""

    algorithm: str

    def backward(self, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: tuple[bool, bool, bool]) -> Any:
        with switched(switches(self.algorithm, "input" if mask[0] else "weight")):
            return super().backward(grad, x, weight, mask)

    def backend(self, x: torch.Tensor, weight: torch.Tensor) -> Any:
        # asked for the input gradient's stand-in, and the switches are among what PyTorch picks by
        with switched(switches(self.algorithm, "input")):
            return super().backend(x, weight)


def under(geometry: Geometry, algorithm: str) -> Geometry:
    """The geometry under the switches that an algorithm names, as it is where it names none."""
    if not is_switched(algorithm):
        return geometry
    made = SwitchedGeometry(*geometry)
    made.algorithm = algorithm
    return made


__all__ = ["SwitchedGeometry", "switched", "under"]
