"""The short way of a ReLU that keeps its own mask, its output to be rebuilt where something reads it, and of one whose
output stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gistkit.capture import Relu
from gistkit.kernels import Masks
from gistkit.nn import relu as relu_op
from gistkit.nn.eligible import overwritable
from gistkit.nn.keep import Alias
from gistkit.runtime.calls import native
from gistkit.runtime.calls.fast import Kind, geometry
from gistkit.runtime.calls.native import Hooks
from gistkit.runtime.calls.one_pass import OnePass, OnePassBody
from gistkit.runtime.forward.kept_ledger import Held
from gistkit.runtime.forward.state import Region
from gistkit.runtime.program.program import Step
from gistkit.runtime.program.stats import payload_bytes
from gistkit.runtime.rebuild.rebuild import Term, builder, fused
from gistkit.runtime.stash.stash import RebuiltBody, Stash

Bind = Callable[[tuple, Mapping, Callable], Term | None]


class FastRelu:
    """A ReLU of a tensor that fills its storage; ``bind``: what makes the recipe's term that is known to be exact
    (:func:`gistkit.runtime.rebuild.rebuild.fused` or ``resolve``), None where there is no recipe."""

    def __init__(self, region: Region, step: Step, b: Relu, y: torch.Tensor, bind: Bind | None) -> None:
        decision: Any = step.output
        self._x, self._inplace, self._bind = Kind(b.x), b.inplace, bind
        self._nbytes, self._row_elements = y.untyped_storage().nbytes(), y.numel() // y.shape[0]
        self._recipe, self._storage, self._reason = decision.recipe, decision.storage, decision.reason
        self._term = ("stash", decision.storage)
        self._own = (step.index, step.op, payload_bytes(y.grad_fn.kept))  # type: ignore[union-attr]
        self._masks, self._geometry = Masks(y), geometry(y)
        self._is_source = self._storage in region.program.sources if region.program is not None else False
        self._one_pass = OnePass(self._recipe, y) if bind is fused and OnePass.takes(self._recipe) else None

    def __call__(self, region: Region, hooks: Hooks, x: Any, inplace: Any) -> torch.Tensor | None:
        if inplace is not self._inplace or not self._x.fits(x) or (inplace and not overwritable(x)):
            return None
        if x.untyped_storage().nbytes() != self._nbytes:
            return None
        if self._bind is None:
            y = relu_op.masked(x, inplace, self._masks)
            region.own.append(self._own)
            region.mark_sparse(y)
            return y
        # a tensor of this kind that fills its storage sees it as y does
        table, origins = region.table, region.origins
        if not origins.are(self._recipe[1], (table.known(x), self._geometry)):
            return None
        body = self._body(region)
        if body is None:
            return None
        y = relu_op.masked(x, inplace, self._masks)
        region.own.append(self._own)
        if type(body) is not OnePassBody:
            body = RebuiltBody(builder(body, y), self._row_elements)
        key = table.add(y, Stash(body, self._storage, "rebuild", self._nbytes, self._reason), True)
        if self._is_source:
            origins.made_as(self._term, (key, self._geometry))
        return y

    def _body(self, region: Region) -> Any:
        """What rebuilds the output, or the term to do so operator by operator; None where something is not there."""
        if self._one_pass is not None:
            return self._one_pass.body(region.norms, region.kept)
        return self._bind(self._recipe, region.norms, region.kept)  # type: ignore[misc]


class FastDenseRelu:
    """A ReLU by PyTorch's own node, whose output y stays as it is."""

    def __init__(self, region: Region, step: Step, b: Relu, y: torch.Tensor) -> None:
        decision: Any = step.output
        self._x, self._inplace = Kind(b.x), b.inplace
        self._nbytes, self._storage = y.untyped_storage().nbytes(), decision.storage
        self._held = Held(None, self._nbytes, self._storage, decision.reason)
        self._is_source = region.program is not None and self._storage in region.program.sources

    @staticmethod
    def takes(region: Region, step: Step, b: Relu, y: torch.Tensor) -> bool:
        """Whether this ReLU, which PyTorch's node has carried out, can be told again by kind."""
        held = step.output is not None and step.output.storage >= 0 and y.untyped_storage()._cdata in region.held
        return held and type(b.x) is torch.Tensor

    def __call__(self, region: Region, hooks: Hooks, x: Any, inplace: Any) -> torch.Tensor | None:
        if inplace is not self._inplace or not self._x.fits(x):
            return None
        if inplace and (not overwritable(x) or x.untyped_storage().nbytes() != self._nbytes):
            return None
        y = native.rectified(hooks, x, inplace)
        hold = Alias(y)
        if self._is_source:
            region.aliased(y, self._storage, hold)
        else:
            region.aliases[self._storage] = hold
        region.held.setdefault(y.untyped_storage()._cdata, self._held)
        region.mark_sparse(y)
        return y


__all__ = ["FastDenseRelu", "FastRelu"]
