"""Training steps as one CUDA graph: a step of a small network is some hundred kernels of a few microseconds each, which
the host issues more slowly than the device runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

EAGER_STEPS = 4
"""Steps before the capture: kernels are compiled and rebuilds checked in the first ones."""


class Figures(NamedTuple):
    """What a step gives: its loss, and how many of its images were told right; both 0-d, on the device."""

    loss: torch.Tensor
    right: torch.Tensor


Step = Callable[[torch.Tensor, torch.Tensor], Figures]


class GraphedSteps:
    """``step(x, targets)``, which leaves gradients in ``parameters`` that had none: a few times as it is, then captured
    and replayed. All batches have the first one's shapes.

    Random numbers come from PyTorch's default generator, which a replay moves on as the step itself would. Other steps
    may come between: a replay reads no gradient, and writes its own tensors.
    """

    def __init__(self, step: Step, parameters: list[torch.nn.Parameter]) -> None:
        self._step, self._parameters, self._done = step, [p for p in parameters if p.requires_grad], 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, x: torch.Tensor, targets: torch.Tensor) -> Figures:
        self._done += 1
        if self._done <= EAGER_STEPS:
            return self._step(x, targets)
        graph = self._graph or self._capture(x, targets)
        self._x.copy_(x)
        self._targets.copy_(targets)
        graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        return Figures(self._found.loss.clone(), self._found.right.clone())

    def _capture(self, x: torch.Tensor, targets: torch.Tensor) -> torch.cuda.CUDAGraph:
        self._x, self._targets = torch.empty_like(x), torch.empty_like(targets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._found = self._step(self._x, self._targets)
        self._graph, self._grads = graph, [p.grad for p in self._parameters]
        return graph
