"""A ReLU's output that is rebuilt in one pass, step after step for tensors of one kind.

The same as a :class:`gistkit.runtime.rebuild.rebuild.FusedTerm`, which knows nothing of the tensors that it will meet:
here the launch is made once (:class:`gistkit.kernels.launch.direct.Rebuilds`), and what a step adds is one object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gistkit.kernels.launch import direct
from gistkit.nn.factors import Factors, plane_of
from gistkit.nn.keep import Alias, Kept
from gistkit.runtime.rebuild.rebuild import BatchNormTerm, FusedTerm, KeptTerm, has_factors
from gistkit.runtime.stash.stash import RebuiltBody, Rows, aligned


class OnePassBody(RebuiltBody):
    """relu(BN(x)), relu(BN(x) + other) or relu(BN(x) + BN(other)). ``terms``: the recipe's, in its order; ``norm`` is
    the one whose arithmetic comes first, ``other`` the other one; ``shape``, ``stride``: the geometry of the output."""

    __slots__ = ("_launch", "_norm", "_other", "_shape", "_stride", "_terms")

    def __init__(
        self, launch: direct.Rebuilds, norm: BatchNormTerm, other: Any, terms: tuple, like: tuple[Any, Any]
    ) -> None:
        self._launch, self._norm, self._other, self._terms = launch, norm, other, terms
        self._shape, self._stride = like

    def __call__(self, x: torch.Tensor) -> OnePassBody:
        """Itself: what a saved-tensor hook makes of an x of the output's geometry."""
        return self

    def is_like(self, x: torch.Tensor) -> bool:
        """Whether x, of whose storage this is the stash, sees it as the output does."""
        return x.shape == self._shape and x.stride() == self._stride

    def dense(self) -> torch.Tensor:
        norm, other, launch = self._norm, self._other, self._launch
        x, factors = norm.kept.dense(), norm.apply
        if other is None:
            if x.stride() != self._stride or x.shape != self._shape:
                return self._build(None)
            return launch(x, factors.vectors, None, [], torch.empty_like(x))  # type: ignore[union-attr]
        if type(other) is BatchNormTerm:
            values, free, vectors = other.kept.dense(), False, other.apply.vectors  # type: ignore[union-attr]
        else:
            values, free, vectors = other.kept.dense(), other.fresh, []
        if (values.dtype, values.shape, values.stride()) != (x.dtype, self._shape, self._stride):
            return self._build(None)
        if x.stride() != self._stride or x.shape != self._shape:
            return self._build(None)
        return launch(x, factors.vectors, values, vectors, values if free else torch.empty_like(x))  # type: ignore[union-attr]

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.threshold_backward(grad, self.dense(), 0)

    @property
    def _row_elements(self) -> int:
        return self._shape.numel() // self._shape[0]

    def _build(self, rows: Rows) -> torch.Tensor:
        values = FusedTerm(*self._terms).dense(rows)
        return values if values.stride() == self._stride else aligned(values, self._stride)


class OnePass:
    """Makes the bodies of one ReLU's output from what a step keeps; ``recipe`` that of the output y, whose one pass is
    known to be exact in these arithmetics."""

    __slots__ = ("_a", "_b", "_launch", "_like")

    def __init__(self, recipe: tuple, y: torch.Tensor) -> None:
        what = recipe[1]
        self._a, self._b = (what[1], what[2]) if what[0] == "add" else (what, None)
        self._like = y.shape, y.stride()
        self._launch: direct.Rebuilds | None = None

    @staticmethod
    def takes(recipe: tuple) -> bool:
        """Whether the recipe's terms are batch norms and kept tensors."""
        what = recipe[1]
        terms = what[1:] if what[0] == "add" else (what,)
        return all(t[0] in ("bn", "stash") for t in terms) and any(t[0] == "bn" for t in terms)

    def body(self, norms: Mapping[int, BatchNormTerm], kept: Callable[[int], Kept | None]) -> OnePassBody | None:
        """The body for this step, None where something is not kept or not in the arithmetics of the steps before."""
        a = _term(self._a, norms, kept)
        b = None if self._b is None else _term(self._b, norms, kept)
        if a is None or (b is None and self._b is not None):
            return None
        # addition commutes, but for which NaN it hands on: CUDA's has one NaN only
        norm: Any
        norm, other = (a, b) if has_factors(a) else (b, a)
        if not has_factors(norm) or (type(other) is BatchNormTerm and type(other.apply) is not Factors):
            return None
        form = norm.apply.form
        other_form = "" if other is None else "values"
        if type(other) is BatchNormTerm:
            other_form = other.apply.form  # type: ignore[union-attr]
        launch = self._launch
        if launch is None or launch.form != form or launch.other_form != other_form:
            launch = self._launch = direct.Rebuilds(plane_of(*self._like), form, other_form)
        return OnePassBody(launch, norm, other, (a, b), self._like)  # type: ignore[arg-type]


def _term(what: tuple, norms: Mapping[int, BatchNormTerm], kept: Callable[[int], Kept | None]) -> Any:
    if what[0] == "bn":
        return norms.get(what[1])
    found = kept(what[1])
    return None if found is None else KeptTerm(found, getattr(found, "fresh", type(found) is not Alias))


__all__ = ["OnePass", "OnePassBody"]
