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

from gistkit.kernels import ops
from gistkit.kernels.layout import flat
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


@dataclass
class BatchNormTerm:
    """BN(x) from the kept x, by what :func:`gistkit.nn.norm.bound` made of the statistics that the forward saved."""

    kept: Kept
    apply: Callable[[torch.Tensor], torch.Tensor]
    fresh = True

    def dense(self, rows: Rows = None) -> torch.Tensor:
        return self.apply(_values(self.kept, rows))


@dataclass
class KeptTerm:
    """A tensor that is kept with its values."""

    kept: Kept
    fresh: bool

    def dense(self, rows: Rows = None) -> torch.Tensor:
        return _values(self.kept, rows)


@dataclass
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


@dataclass
class ReluTerm:
    """relu(a)."""

    a: Term
    fresh = True

    def dense(self, rows: Rows = None) -> torch.Tensor:
        a = self.a.dense(rows)
        return a.relu_() if self.a.fresh else a.relu()


@dataclass
class FusedTerm:
    """relu(BN(x)), relu(BN(x) + other) or relu(BN(x) + BN(other)) in one pass (:mod:`gistkit.kernels.rebuild`), in
    other's own memory where that is free to use; ``parts`` does the same operator by operator."""

    factors: Factors
    x: KeptTerm
    other_factors: Factors | None
    other: Term | None
    parts: ReluTerm
    fresh = True

    @property
    def other_is_free(self) -> bool:
        return self.other is not None and self.other.fresh

    @classmethod
    def of(cls, term: ReluTerm) -> FusedTerm | None:
        """The term in one pass, or None where the kernel has no such pass."""
        a, b = (term.a.a, term.a.b) if isinstance(term.a, AddTerm) else (term.a, None)
        if _factors(a) is None:  # addition commutes, but for which NaN it hands on: CUDA's has one NaN only
            a, b = b, a
        factors, other_factors = _factors(a), _factors(b)
        if factors is None:
            return None
        other = _operand(b) if other_factors is not None else b
        return cls(factors, _operand(a), other_factors, other, term)

    def dense(self, rows: Rows = None) -> torch.Tensor:
        x = self.x.dense(rows)
        other = None if self.other is None else self.other.dense(rows)
        if other is not None and (other.dtype, other.shape, other.stride()) != (x.dtype, x.shape, x.stride()):
            return self.parts.dense(rows)
        y = torch.empty_like(x) if other is None or not self.other_is_free else other
        norm, second = self.factors, self.other_factors
        ops.bn_rebuild(
            flat(x),
            norm.vectors,
            norm.form,
            norm.plane(x),
            None if other is None else flat(other),
            [] if second is None else second.vectors,
            "" if second is None else second.form,
            True,
            flat(y),
        )
        return y


def _factors(term: Term | None) -> Factors | None:
    found = term.apply if isinstance(term, BatchNormTerm) else None
    return found if isinstance(found, Factors) else None


def _operand(term: Any) -> KeptTerm:
    """A batch norm's input; not fresh, for who else reads it is unknown here."""
    return KeptTerm(term.kept, False)


def resolve(recipe: tuple, norms: Mapping[int, BatchNormTerm], kept: Callable[[int], Kept | None]) -> Term | None:
    """The recipe bound to this step's tensors, or None where one of them is not kept."""
    kind = recipe[0]
    if kind == "bn":
        return norms.get(recipe[1])
    if kind == "stash":
        found = kept(recipe[1])
        return None if found is None else KeptTerm(found, getattr(found, "fresh", not isinstance(found, Alias)))
    parts: list[Any] = [resolve(r, norms, kept) for r in recipe[1:]]
    if any(p is None for p in parts):
        return None
    return AddTerm(*parts) if kind == "add" else ReluTerm(*parts)


def builder(term: Term, y: torch.Tensor) -> Callable[[Rows], torch.Tensor]:
    """A function that rebuilds y or rows of it (its values, its strides) from the term; it does not hold y."""
    stride = y.stride()
    return lambda rows: aligned(term.dense(rows), stride)


__all__ = [
    "AddTerm", "BatchNormTerm", "FusedTerm", "KeptTerm", "ReluTerm", "Term", "builder", "resolve", "same_bits",
]  # fmt: skip
