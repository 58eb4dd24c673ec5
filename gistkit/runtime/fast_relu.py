"""The short way of a ReLU that keeps its own mask, its output to be rebuilt where something reads it."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.graph.calls import Relu
from gistkit.nn import relu as relu_op
from gistkit.nn.eligible import overwritable
from gistkit.runtime.exactness import way
from gistkit.runtime.fast import Kind
from gistkit.runtime.program import Step
from gistkit.runtime.rebuild import ReluTerm, builder, resolve
from gistkit.runtime.region import Region
from gistkit.runtime.stash import RebuiltBody, Stash
from gistkit.runtime.stats import payload_bytes


class FastRelu:
    """A ReLU of a tensor that fills its storage; ``number``: the way of its recipe that is known to be exact
    (:func:`gistkit.runtime.exactness.way`), None where there is no recipe."""

    def __init__(self, step: Step, b: Relu, y: torch.Tensor, number: int | None) -> None:
        self._x, self._inplace, self._number = Kind(b.x), b.inplace, number
        self._nbytes = y.untyped_storage().nbytes()
        self._decision, self._row_elements = step.output, y.numel() // y.shape[0]
        self._own = (step.index, step.op, payload_bytes(y.grad_fn.kept))  # type: ignore[union-attr]

    def __call__(self, region: Region, b: Relu, *_: Any) -> torch.Tensor | None:
        x = b.x
        if not self._x.fits(x) or b.inplace is not self._inplace or (b.inplace and not overwritable(x)):
            return None
        if x.untyped_storage().nbytes() != self._nbytes:
            return None
        term = None
        if self._number is not None:
            term = resolve(self._decision.recipe, region.norms, region.kept)  # type: ignore[union-attr]
            if type(term) is not ReluTerm:
                return None
        y = relu_op.masked(x, b.inplace)
        region.own.append(self._own)
        if term is None:
            region.mark_sparse(y)
        else:
            self._stash(region, y, term)
        return y

    def _stash(self, region: Region, y: torch.Tensor, term: ReluTerm) -> None:
        decision: Any = self._decision
        number: Any = self._number
        body = RebuiltBody(builder(way(term, number), y), self._row_elements)
        stash = Stash(body, decision.storage, "rebuild", self._nbytes, decision.reason)
        region.table.add(y, stash, tag=True)


__all__ = ["FastRelu"]
