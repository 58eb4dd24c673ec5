"""Tensors that are not kept because kept ones give them back: ReLU(BN(x)), ReLU(BN(x) + identity), ...

A recipe is nested tuples of data, as a plan holds it: ``("bn", covered call)``, ``("stash", storage)``,
``("add", a, b)``, ``("relu", a)``. :class:`Recipe` binds it to one forward's tensors by walking the backward nodes from
the ReLU's input: the node of an addition leads to those of its terms, the node of a batch norm keeps input and
statistics. So what is rebuilt is what the forward really computed; where the nodes are others there is no term.

Rebuilding uses the forward's own operators in the forward's operand order (which NaN an addition hands on depends on
it), so the result is the forward's, bit for bit. That is relied on only once a recipe has given the forward's own bits,
in each shape, dtype and layout and on each device (:class:`Exactness`). Gist section II-B: recomputing cheap layers is
compatible with encodings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from gistkit.ir import part_bytes
from gistkit.kernels.launch import direct
from gistkit.nn.keep import Kept, unchanged
from gistkit.nn.norm import KERNEL_CANDIDATES, Factors, Rebuild, plane_of, result_like, widens
from gistkit.runtime.rebuild.arithmetic import Kind, arithmetics
from gistkit.runtime.stash.stash import RebuiltBody, Rows, rows_of, source_of
from gistkit.runtime.stash.verify import Digest, Trial, blocks, same_bits

ADD = "AddBackward0"
NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")


class Term(Protocol):
    """A part of a recipe bound to kept tensors; ``fresh``: dense() gives memory that may be overwritten. ``rows``
    (start, stop) restricts it to a part of the batch, as every operator of a recipe works row by row."""

    @property
    def fresh(self) -> bool: ...

    def dense(self, rows: Rows = None) -> torch.Tensor: ...


class NormSource(NamedTuple):
    """A batch norm of the running forward. ``kept``, ``geometry``: of its input where its node no longer keeps it."""

    node: Any
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    kept: Kept | None = None
    geometry: tuple = ()

    @classmethod
    def of(cls, node: Any) -> NormSource | None:
        """From its node alone; None where the node does not lead to its bias (a bias that needs no gradient)."""
        if type(node).__name__ not in NORMS or not node._saved_training:
            return None
        weight = node._saved_weight
        if weight is None:
            return cls(node, None, None)
        bias = getattr(node.next_functions[2][0], "variable", None)
        return None if bias is None else cls(node, weight, bias)

    @property
    def kind(self) -> Kind:
        eps = getattr(self.node, "_saved_eps", None)
        eps = self.node._saved_epsilon if eps is None else eps
        affine = None if self.weight is None else self.weight.dtype
        shape, stride, dtype, device = self.geometry or geometry_of(self.node._saved_input)
        return Kind(shape, stride, dtype, device, affine, eps)


def geometry_of(x: torch.Tensor) -> tuple:
    """Shape, strides, dtype and device."""
    return tuple(x.shape), x.stride(), x.dtype, x.device


class NormTerm:
    """BN(x) from what the batch norm's node keeps. PyTorch's batch norm reads no bias in backward: one that was written
    to since forward is an error here."""

    __slots__ = ("_bias", "_kept", "_node", "_version", "arithmetic")
    fresh = True

    def __init__(self, source: NormSource, arithmetic: Rebuild) -> None:
        self._node, self._bias, self._kept = source.node, source.bias, source.kept
        self._version = 0 if source.bias is None else source.bias._version
        self.arithmetic = arithmetic

    def input(self, rows: Rows = None) -> torch.Tensor:
        if self._kept is not None:
            return self._kept.dense() if rows is None else rows_of(self._kept, *rows)
        x = self._node._saved_input
        return x if rows is None else x[rows[0] : rows[1]]

    def vectors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        node, bias = self._node, self._bias
        if bias is not None and bias._version != self._version:
            unchanged(bias, self._version)
        return node._saved_result1, node._saved_result2, node._saved_weight, bias

    def norm(self) -> list[torch.Tensor]:
        """Mean, 1/std, weight and bias for gistkit's kernel, where the arithmetic is one of its."""
        mean, invstd, weight, bias = self.vectors()
        if weight is None or bias is None or mean.dtype is not torch.float32:
            return Factors(self.arithmetic.args[0], mean, invstd, weight, bias).norm  # type: ignore[attr-defined]
        return [mean, invstd, weight.detach(), bias.detach()]

    def dense(self, rows: Rows = None) -> torch.Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.dense(rows)
        x, vectors = self.input(rows), self.vectors()
        if not widens(self.arithmetic, x):
            return self.arithmetic(x, *vectors)
        y = result_like(self.arithmetic, x)
        for index in blocks(x, part_bytes(x.numel() * x.element_size())):
            y[index] = self.arithmetic(x[index], *[None if v is None else v[index[1]] for v in vectors])
        return y


@dataclass(slots=True)
class KeptTerm:
    """What a hold gives back."""

    kept: Kept
    fresh: bool = False

    def dense(self, rows: Rows = None) -> torch.Tensor:
        values, self.fresh = source_of(self.kept, rows)
        return values


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
    """relu(a), in a's own memory where that is free to use."""

    a: Term
    fresh = True

    def dense(self, rows: Rows = None) -> torch.Tensor:
        a = self.a.dense(rows)
        return a.relu_() if self.a.fresh else a.relu()


class FusedTerm:
    """relu(BN(x)), relu(BN(x) + other) or relu(BN(x) + BN(other)) by one launch of gistkit's kernel over tensors of y's
    geometry ``like``; ``total``: what relu is applied to, for other geometries and for rows."""

    __slots__ = ("_launch", "_like", "_norm", "_other", "_total")
    fresh = True

    def __init__(self, launch: direct.Rebuilds, norm: NormTerm, other: Term | None, total: Term, like: tuple) -> None:
        self._launch, self._norm, self._other, self._total, self._like = launch, norm, other, total, like

    def dense(self, rows: Rows = None) -> torch.Tensor:
        norm, other = self._norm, self._other
        x = None if rows is not None else norm.input()
        if x is None or (x.dtype, x.shape, x.stride()) != self._like:
            return ReluTerm(self._total).dense(rows)
        if other is None:
            return self._launch(x, norm.norm(), None, [], torch.empty_like(x))
        values = other.input() if type(other) is NormTerm else other.dense()
        if (values.dtype, values.shape, values.stride()) != self._like:
            return ReluTerm(self._total).dense()
        if type(other) is NormTerm:  # its input is not free: who else reads it is unknown here
            return self._launch(x, norm.norm(), values, other.norm(), torch.empty_like(x))
        return self._launch(x, norm.norm(), values, [], values if other.fresh else torch.empty_like(x))


class Recipe:
    """The recipe of one ReLU's output, bound to the tensors of forward after forward. ``verified``: where the
    arithmetics of batch norms are remembered; ``fused``: by one launch."""

    def __init__(self, steps: tuple, verified: dict, y: torch.Tensor, fused: bool) -> None:
        self._steps, self._verified, self._fused = steps[1], verified, fused
        self._arithmetics: dict[int, Rebuild] = {}
        self._like, self._launch = (y.dtype, y.shape, y.stride()), None

    def term(self, node: Any, norms: dict[int, NormSource], kept: Callable[[int, Any], Kept | None]) -> Term | None:
        """relu of what ``node`` made; None where the nodes are not the recipe's, an arithmetic is unknown or something
        is not kept. ``norms``: batch norms that ran under the plan, by covered call; ``kept(storage, node)``:
        the hold on a planned storage that this node made."""
        bound = self._bound(self._steps, node, norms, kept)
        if bound is None:
            return None
        return self._by_kernel(bound) if self._fused else ReluTerm(bound)

    def _bound(self, steps: tuple, node: Any, norms: dict, kept: Callable) -> Term | None:
        kind, first = steps[0], steps[1]
        if kind == "bn":
            source = norms.get(first)
            source = NormSource.of(node) if source is None else source if source.node is node else None
            if source is None:
                return None
            if first not in self._arithmetics:
                able = arithmetics(self._verified, source.kind)
                if not able:
                    return None
                self._arithmetics[first] = able[0]
            return NormTerm(source, self._arithmetics[first])
        if kind == "stash":
            found = kept(first, node)
            return None if found is None else KeptTerm(found)
        if kind != "add" or type(node).__name__ != ADD or node._saved_alpha != 1:
            return None
        (a_node, _), (b_node, _) = node.next_functions
        a = self._bound(first, a_node, norms, kept)
        b = None if a is None else self._bound(steps[2], b_node, norms, kept)
        return None if a is None or b is None else AddTerm(a, b)

    def _by_kernel(self, total: Term) -> Term:
        norm: Any = total
        other: Any = None
        if type(total) is AddTerm:
            # addition commutes, but for which NaN it hands on: CUDA's has one NaN only
            norm, other = (total.a, total.b) if has_kernel(total.a) else (total.b, total.a)
        if self._launch is None:
            other_form = "" if other is None else _form(other) if has_kernel(other) else "values"
            self._launch = direct.Rebuilds(plane_of(*self._like[1:]), _form(norm), other_form)
        return FusedTerm(self._launch, norm, other, total, self._like)


def has_kernel(term: Any) -> bool:
    """Whether a term is a batch norm in an arithmetic of gistkit's kernel."""
    return type(term) is NormTerm and term.arithmetic in KERNEL_CANDIDATES


def _form(term: Any) -> str:
    return term.arithmetic.args[0]


def _can_fuse(total: Term) -> bool:
    """Whether one launch does it: a batch norm alone, or its sum with another or with a kept tensor."""
    parts = (total.a, total.b) if type(total) is AddTerm else (total,)
    return any(map(has_kernel, parts)) and all(has_kernel(part) or type(part) is KeptTerm for part in parts)


class Exactness:
    """How one ReLU's output y comes back exactly: by one launch, else operator by operator, else not at all.

    ``verified`` remembers what was found, by call, recipe and geometry; ``bind`` leads from a recipe to its term in the
    running forward. ``recipes``: those that may be exact, the quickest first."""

    def __init__(self, verified: dict, call: int, steps: tuple, y: torch.Tensor, bind: Callable[[Recipe], Any]) -> None:
        self._verified, self._y, self._bind = verified, y, bind
        self._key = ("relu", call, steps, y.dtype, y.device, tuple(y.shape), y.stride())
        by_operators = Recipe(steps, verified, y, fused=False)
        term = bind(by_operators)
        self.recipes = [] if term is None else [by_operators]
        if isinstance(term, ReluTerm) and _can_fuse(term.a):
            self.recipes.insert(0, Recipe(steps, verified, y, fused=True))

    def check(self) -> Recipe | None:
        """The first recipe that gives y's bits now. Synchronises where it is new."""
        if self._key not in self._verified:
            y = self._y.detach()
            with torch.no_grad():
                same = (same_bits(RebuiltBody(self._bind(r), y).dense(), y) for r in self.recipes)
                self._verified[self._key] = next((i for i, equal in enumerate(same) if equal), None)
        number = self._verified[self._key]
        return None if number is None or number >= len(self.recipes) else self.recipes[number]

    @property
    def known(self) -> bool:
        return self._key in self._verified

    def later(self, refuse: Callable[[], None]) -> RebuiltBody:
        """A body that compares a digest of y with what its first use in backward rebuilds, as under a budget no second
        such tensor has room in forward; ``refuse()``, which must raise, is called where no recipe is exact."""
        verified, key = self._verified, self._key  # the body must not hold y

        def found(number: int | None) -> None:
            verified[key] = number
            if number is None:
                refuse()

        ways = [RebuiltBody(self._bind(r), self._y).dense for r in self.recipes]
        return RebuiltBody(Trial(ways, Digest(self._y.detach()), found), self._y)
