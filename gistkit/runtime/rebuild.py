"""Tensors that are not kept because kept ones give them back: ReLU(BN(x)), ReLU(BN(x) + identity), ...

A recipe is nested tuples of data, as a plan holds it: ``("bn", covered call)``, ``("stash", storage)``,
``("add", a, b)``, ``("relu", a)``. ``resolve`` binds one to the kept tensors of the running step. Rebuilding uses the
forward's own operators in the forward's operand order (which NaN an addition hands on depends on it), so the result is
the forward's, bit for bit; :mod:`gistkit.runtime.exactness` checks that before anybody relies on it. Sources: Gist
section II-B (recomputing cheap layers is compatible with encodings), docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gistkit.nn.keep import Alias, Kept
from gistkit.nn.norm import Factors
from gistkit.runtime.stash import Rows, aligned, rows_of
from gistkit.runtime.verify import same_bits


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
    """BN(x) from the kept x, by what :func:`gistkit.nn.norm.bound` made of the statistics that the forward saved."""

    kept: Kept
    apply: Callable[[torch.Tensor], torch.Tensor]
    fresh = True

    def dense(self, rows: Rows = None) -> torch.Tensor:
        return self.apply(_values(self.kept, rows))


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


@dataclass(slots=True)
class FusedTerm:
    """relu(BN(x)), relu(BN(x) + other) or relu(BN(x) + BN(other)) in one pass (:mod:`gistkit.kernels.rebuild`), in
    other's own memory where that is free to use; ``parts`` does the same operator by operator."""

    norm: BatchNormTerm
    other_norm: BatchNormTerm | None
    other: Term | None
    parts: ReluTerm
    fresh = True

    @classmethod
    def of(cls, term: ReluTerm) -> FusedTerm | None:
        """The term in one pass, or None where the kernel has no such pass."""
        if type(term.a) is not AddTerm:
            return cls(term.a, None, None, term) if _has_factors(term.a) else None  # type: ignore[arg-type]
        a, b = term.a.a, term.a.b
        if not _has_factors(a):  # addition commutes, but for which NaN it hands on: CUDA's has one NaN only
            a, b = b, a
        if not _has_factors(a):
            return None
        other, values = (b, None) if _has_factors(b) else (None, b)
        return cls(a, other, values, term)  # type: ignore[arg-type]

    def dense(self, rows: Rows = None) -> torch.Tensor:
        norm, other_norm = self.norm, self.other_norm
        x = norm.kept.dense() if rows is None else rows_of(norm.kept, *rows)
        factors: Any = norm.apply
        if other_norm is None and self.other is None:
            return factors.relu(x, torch.empty_like(x))
        # a batch norm's input is not free, for who else reads it is unknown here
        if other_norm is not None:
            other, free, second = _values(other_norm.kept, rows), False, other_norm.apply
        else:
            other, free, second = self.other.dense(rows), self.other.fresh, None  # type: ignore[union-attr]
        if (other.dtype, other.shape, other.stride()) != (x.dtype, x.shape, x.stride()):
            return self.parts.dense(rows)
        return factors.relu(x, other if free else torch.empty_like(x), other, second)


def _has_factors(term: Term) -> bool:
    return type(term) is BatchNormTerm and type(term.apply) is Factors


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
    "AddTerm", "BatchNormTerm", "FusedTerm", "KeptTerm", "ReluTerm", "Term", "builder", "resolve", "same_bits",
]  # fmt: skip
