"""Tensors that are not kept because kept ones give them back: ReLU(BN(x)), ReLU(BN(x) + identity), ...

A recipe is nested tuples of data, as a plan holds it: ``("bn", covered call)``, ``("stash", storage)``,
``("add", a, b)``, ``("relu", a)``. ``resolve`` binds one to the kept tensors of the running step. Rebuilding uses the
forward's own operators in the forward's operand order (which NaN an addition hands on depends on it), so the result is
the forward's, bit for bit; :mod:`gistkit.runtime.rebuild.exactness` checks that before anybody relies on it. Sources:
Gist section II-B (recomputing cheap layers is compatible with encodings), docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gistkit.ir import part_bytes
from gistkit.nn.factors import Factors
from gistkit.nn.keep import Alias, Kept
from gistkit.nn.norm import Bound
from gistkit.runtime.stash.stash import Rows, aligned, rows_of
from gistkit.runtime.stash.verify import blocks, same_bits


class Term(Protocol):
    """A part of a recipe bound to kept tensors; ``fresh`` says that dense() gives memory that may be overwritten.

    ``rows`` (start, stop) restricts it to a part of the batch: every operator of a recipe works row by row.
    """

    fresh: bool

    def dense(self, rows: Rows = None) -> torch.Tensor: ...


def _values(kept: Kept, rows: Rows) -> torch.Tensor:
    return kept.dense() if rows is None else rows_of(kept, *rows)


@dataclass(slots=True)
class BatchNormTerm:
    """BN(x) from the kept x, by what :func:`gistkit.nn.norm.bound` made of the statistics that the forward saved.

    In blocks where it takes fp32 copies or the like besides its result, so that plans need count only a block's."""

    kept: Kept
    apply: Bound | Callable[[torch.Tensor], torch.Tensor]
    fresh = True

    def dense(self, rows: Rows = None) -> torch.Tensor:
        x, apply = _values(self.kept, rows), self.apply
        if not isinstance(apply, Bound) or not apply.widens(x):
            return apply(x)
        y = apply.result_like(x)
        for index in blocks(x, part_bytes(x.numel() * x.element_size())):
            y[index] = apply(x[index], index[1])
        return y


@dataclass(slots=True)
class KeptTerm:
    """A tensor that is kept with its values."""

    kept: Kept
    fresh: bool

    def dense(self, rows: Rows = None) -> torch.Tensor:
        return _values(self.kept, rows)


@dataclass(slots=True)
class AddTerm:
    """a + b, in a's or b's own memory where that is free to use."""

    a: Term
    b: Term
    fresh = True

    def dense(self, rows: Rows = None) -> torch.Tensor:
        a, b = self.a.dense(rows), self.b.dense(rows)
        if self.a.fresh:
            return torch.add(a, b, out=a)
        return torch.add(a, b, out=b) if self.b.fresh else torch.add(a, b)


@dataclass(slots=True)
class ReluTerm:
    """relu(a)."""

    a: Term
    fresh = True

    def dense(self, rows: Rows = None) -> torch.Tensor:
        a = self.a.dense(rows)
        return a.relu_() if self.a.fresh else a.relu()


class FusedTerm:
    """relu(BN(x)), relu(BN(x) + other) or relu(BN(x) + BN(other)) in one pass
    (:mod:`gistkit.kernels.rebuild.rebuild`), in
    other's own memory where that is free to use. ``a``, ``b``: the terms that are added, in the recipe's order, of
    which one at least is such a BN; b may be None."""

    __slots__ = ("_a", "_b")
    fresh = True

    def __init__(self, a: Term, b: Term | None) -> None:
        self._a, self._b = a, b

    @classmethod
    def of(cls, term: ReluTerm) -> FusedTerm | None:
        """The term in one pass, or None where the kernel has no such pass."""
        a, b = (term.a.a, term.a.b) if type(term.a) is AddTerm else (term.a, None)
        return cls(a, b) if has_factors(a) or (b is not None and has_factors(b)) else None

    @property
    def parts(self) -> ReluTerm:
        """The same operator by operator."""
        return ReluTerm(self._a if self._b is None else AddTerm(self._a, self._b))

    def dense(self, rows: Rows = None) -> torch.Tensor:
        norm, other = self._a, self._b
        if other is None:
            x = _input(norm, rows)
            return norm.apply.relu(x, torch.empty_like(x))  # type: ignore[union-attr]
        if not has_factors(norm):  # addition commutes, but for which NaN it hands on: CUDA's has one NaN only
            norm, other = other, norm
        x = _input(norm, rows)
        if has_factors(other):  # its input is not free, for who else reads it is unknown here
            values, free, factors = _input(other, rows), False, other.apply  # type: ignore[union-attr]
        else:
            values, free, factors = other.dense(rows), other.fresh, None
        if (values.dtype, values.shape, values.stride()) != (x.dtype, x.shape, x.stride()):
            return self.parts.dense(rows)
        return norm.apply.relu(x, values if free else torch.empty_like(x), values, factors)  # type: ignore[union-attr]


def _input(norm: Any, rows: Rows) -> torch.Tensor:
    return norm.kept.dense() if rows is None else rows_of(norm.kept, *rows)


def has_factors(term: Any) -> bool:
    """Whether a term is a batch norm in an arithmetic that the one pass has."""
    return type(term) is BatchNormTerm and type(term.apply) is Factors


def fused(recipe: tuple, norms: Mapping[int, BatchNormTerm], kept: Callable[[int], Kept | None]) -> FusedTerm | None:
    """A ReLU's recipe bound to this step's tensors in one pass; None where there is no such pass or no such tensor."""
    what = recipe[1]
    if what[0] == "bn":
        norm = norms.get(what[1])
        return FusedTerm(norm, None) if norm is not None and type(norm.apply) is Factors else None
    term = resolve(recipe, norms, kept)
    return FusedTerm.of(term) if type(term) is ReluTerm else None


def resolve(recipe: tuple, norms: Mapping[int, BatchNormTerm], kept: Callable[[int], Kept | None]) -> Term | None:
    """The recipe bound to this step's tensors, or None where one of them is not kept."""
    kind, first = recipe[0], recipe[1]
    if kind == "bn":
        return norms.get(first)
    if kind == "stash":
        found = kept(first)
        return None if found is None else KeptTerm(found, getattr(found, "fresh", not isinstance(found, Alias)))
    a = resolve(first, norms, kept)
    if a is None or kind != "add":
        return None if a is None else ReluTerm(a)
    b = resolve(recipe[2], norms, kept)
    return None if b is None else AddTerm(a, b)


class builder:
    """A function that rebuilds y or rows of it (its values, its strides) from the term; it does not hold y."""

    __slots__ = ("_stride", "_term")

    def __init__(self, term: Term, y: torch.Tensor) -> None:
        self._term, self._stride = term, y.stride()

    def __call__(self, rows: Rows) -> torch.Tensor:
        values = self._term.dense(rows)
        return values if values.stride() == self._stride else aligned(values, self._stride)


__all__ = [
    "AddTerm", "BatchNormTerm", "FusedTerm", "KeptTerm", "ReluTerm", "Term", "builder", "fused",
    "has_factors", "resolve", "same_bits",
]  # fmt: skip
