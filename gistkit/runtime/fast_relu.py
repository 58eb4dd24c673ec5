"""The short way of a ReLU that keeps its own mask, its output to be rebuilt where something reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gistkit.graph.calls import Relu
from gistkit.nn import relu as relu_op
from gistkit.nn.eligible import overwritable
from gistkit.runtime.fast import Kind
from gistkit.runtime.program import Step
from gistkit.runtime.rebuild import Term, builder
from gistkit.runtime.region import Region
from gistkit.runtime.stash import RebuiltBody, Stash
from gistkit.runtime.stats import payload_bytes

Bind = Callable[[tuple, Mapping, Callable], Term | None]


class FastRelu:
    """A ReLU of a tensor that fills its storage; ``bind``: what makes the recipe's term that is known to be exact
    (:func:`gistkit.runtime.rebuild.fused` or ``resolve``), None where there is no recipe."""

    def __init__(self, step: Step, b: Relu, y: torch.Tensor, bind: Bind | None) -> None:
        decision: Any = step.output
        self._x, self._inplace, self._bind = Kind(b.x), b.inplace, bind
        self._nbytes, self._row_elements = y.untyped_storage().nbytes(), y.numel() // y.shape[0]
        self._recipe, self._storage, self._reason = decision.recipe, decision.storage, decision.reason
        self._own = (step.index, step.op, payload_bytes(y.grad_fn.kept))  # type: ignore[union-attr]

    def __call__(self, region: Region, b: Relu, *_: Any) -> torch.Tensor | None:
        x, term = b.x, None
        if not self._x.fits(x) or b.inplace is not self._inplace or (b.inplace and not overwritable(x)):
            return None
        if x.untyped_storage().nbytes() != self._nbytes:
            return None
        if self._bind is not None:
            if not region.origins.are(self._recipe[1], region.origins.key(x)):
                return None
            term = self._bind(self._recipe, region.norms, region.kept)
            if term is None:
                return None
        y = relu_op.masked(x, b.inplace, None, False)
        region.own.append(self._own)
        if term is None:
            region.mark_sparse(y)
            return y
        body = RebuiltBody(builder(term, y), self._row_elements)
        region.stashed(y, Stash(body, self._storage, "rebuild", self._nbytes, self._reason), tag=True)
        return y


__all__ = ["FastRelu"]
