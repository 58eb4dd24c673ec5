"""Tensors that are not kept because kept ones give them back: ReLU(BN(x)), ReLU(BN(x) + identity), ...

:class:`Recipe` binds a plan's recipe (:class:`gistkit.ir.plan.Decision`) to one forward's tensors by walking the
backward nodes from the ReLU's input (docs/runtime.md, "Rebuilds"). The forward's own operators run in its operand order
(which NaN an addition hands on depends on it). That is relied on only once a recipe has given the forward's own bits
(:class:`Exactness`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gistkit.ir import part_bytes
from gistkit.kernels.launch import direct
from gistkit.nn.keep import Kept, unchanged
from gistkit.nn.norm import KERNEL_CANDIDATES, Rebuild, kernel_factors, plane_of, result_like, widens
from gistkit.runtime.rebuild.arithmetic import Kind, arithmetics
from gistkit.runtime.stash.stash import RebuiltBody, Stash
from gistkit.runtime.stash.verify import blocks, digest, same_bits

ADD = "AddBackward0"
NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")


class NormSource:
    """A batch norm of the running forward. ``kept``, ``geometry``: of its input where its node no longer keeps it.
    PyTorch's batch norm reads no bias in backward: one that was written to since forward is an error here."""

    __slots__ = ("_bias", "_geometry", "_kept", "_version", "node")

    def __init__(
        self, node: Any, bias: torch.Tensor | None, kept: Kept | None = None, geometry: tuple | None = None
    ) -> None:
        self.node, self._bias, self._kept, self._geometry = node, bias, kept, geometry
        self._version = 0 if bias is None else bias._version

    @classmethod
    def of(cls, node: Any) -> NormSource | None:
        """From its node alone; None where the node does not lead to its bias (a bias that needs no gradient)."""
        if type(node).__name__ not in NORMS or not node._saved_training:
            return None
        bias = getattr(node.next_functions[2][0], "variable", None)
        return None if bias is None and node._saved_weight is not None else cls(node, bias)

    @property
    def kind(self) -> Kind:
        node = self.node
        eps = getattr(node, "_saved_eps", None)
        eps = node._saved_epsilon if eps is None else eps
        weight = node._saved_weight
        shape, stride, dtype, device = self._geometry or geometry_of(node._saved_input)
        return Kind(tuple(shape), stride, dtype, device, None if weight is None else weight.dtype, eps)

    def input(self) -> torch.Tensor:
        return self.node._saved_input if self._kept is None else self._kept.dense()

    def vectors(self) -> list[Any]:
        """Mean, 1/std, weight and bias."""
        node, bias = self.node, self._bias
        if bias is not None and bias._version != self._version:
            unchanged(bias, self._version)
        return [node._saved_result1, node._saved_result2, node._saved_weight, bias]

    def factors(self) -> list[torch.Tensor]:
        """The same for gistkit's kernel."""
        mean, _, weight, bias = vectors = self.vectors()
        if weight is None or bias is None or mean.dtype is not torch.float32:
            return kernel_factors(*vectors)
        return vectors

    def dense(self, arithmetic: Rebuild) -> torch.Tensor:
        """BN(x), in memory of its own."""
        x, vectors = self.input(), self.vectors()
        if not widens(arithmetic, x):
            return arithmetic(x, *vectors)
        y = result_like(arithmetic, x)
        for index in blocks(x, part_bytes(x.numel() * x.element_size())):
            y[index] = arithmetic(x[index], *[None if v is None else v[index[1]] for v in vectors])
        return y


def geometry_of(x: torch.Tensor) -> tuple:
    """Shape, strides, dtype and device."""
    return x.shape, x.stride(), x.dtype, x.device


VALUES = "values"
"""Of the kernel's forms the one of a tensor that is added as it is."""
Leaves = list[Any]
"""What a recipe starts from in one forward, from left to right: a :class:`NormSource` or a hold each."""


class Recipe:
    """The recipe of one ReLU's output y, bound to the tensors of forward after forward. ``verified``: where the
    arithmetics of batch norms are remembered.

    With a ``launch`` relu(BN(x)), relu(BN(x) + other) or relu(BN(x) + BN(other)) is one launch of gistkit's kernel over
    tensors of y's geometry; the batch norm is leaf number ``norm_at``."""

    def __init__(
        self, steps: tuple, verified: dict, y: torch.Tensor, launch: direct.Rebuilds | None = None, norm_at: int = 0
    ) -> None:
        self._steps, self._verified, self._launch, self._norm_at = steps, verified, launch, norm_at
        self._arithmetics: dict[int, Rebuild] = {}
        self._like = (y.dtype, y.shape, y.stride())

    def body(self, node: Any, norms: dict[int, NormSource], kept: Callable[[int, Any], Any]) -> RebuiltBody | None:
        """What gives back relu of what ``node`` made; None where the nodes are not the recipe's, an arithmetic is
        unknown or something is not kept. ``norms``: batch norms that ran under the plan, by covered call;
        ``kept(storage, node)``: the hold on a planned storage that this node made."""
        leaves: Leaves = []
        kind, first = self._steps[1][:2]
        if kind == "bn" and first in self._arithmetics and first not in norms:
            source = NormSource.of(node)
            return None if source is None else RebuiltBody(partial(self.values, [source]))
        if not self._bind(self._steps[1], node, norms, kept, leaves):
            return None
        return RebuiltBody(partial(self.values, leaves))

    def _bind(self, part: tuple, node: Any, norms: dict, kept: Callable, leaves: Leaves) -> bool:
        kind, first = part[0], part[1]
        if kind == "bn":
            source = norms.get(first)
            source = NormSource.of(node) if source is None else source if source.node is node else None
            if source is None:
                return False
            if first not in self._arithmetics:
                able = arithmetics(self._verified, source.kind)
                if not able:
                    return False
                self._arithmetics[first] = able[0]
            leaves.append(source)
            return True
        if kind == "stash":
            leaves.append(kept(first, node))
            return leaves[-1] is not None
        if kind != "add" or type(node).__name__ != ADD or node._saved_alpha != 1:
            return False
        (a, _), (b, _) = node.next_functions
        return self._bind(first, a, norms, kept, leaves) and self._bind(part[2], b, norms, kept, leaves)

    def values(self, leaves: Leaves) -> torch.Tensor:
        """y from what one forward has bound."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.values(leaves)
        if self._launch is not None:
            y = self._launched(self._launch, leaves)
            if y is not None:
                return y
        total, fresh = self._part(self._steps[1], iter(leaves))
        y, stride = total.relu_() if fresh else total.relu(), self._like[2]
        if y.stride() == stride:
            return y
        return torch.empty_strided(y.size(), stride, dtype=y.dtype, device=y.device).copy_(y)

    def _part(self, part: tuple, leaves: Iterator[Any]) -> tuple[torch.Tensor, bool]:
        """(values, whether they may be overwritten) of a part of the recipe, whose leaves come next."""
        if part[0] == "bn":
            return next(leaves).dense(self._arithmetics[part[1]]), True
        if part[0] == "stash":
            return _values_of(next(leaves))
        (a, a_fresh), (b, b_fresh) = self._part(part[1], leaves), self._part(part[2], leaves)
        return torch.add(a, b, out=a if a_fresh else b if b_fresh else None), True

    def _launched(self, launch: direct.Rebuilds, leaves: Leaves) -> torch.Tensor | None:
        norm, like = leaves[self._norm_at], self._like
        x = norm.input()
        if (x.dtype, x.shape, x.stride()) != like:
            return None
        if not launch.other_form:
            return launch(x, norm.factors(), None, [], torch.empty_like(x))
        other, fresh, factors = leaves[1 - self._norm_at], False, []
        if type(other) is NormSource:  # its input is not free: who else reads it is unknown here
            values, factors = other.input(), other.factors()
        else:
            values, fresh = _values_of(other)
        if (values.dtype, values.shape, values.stride()) != like:
            return None
        return launch(x, norm.factors(), values, factors, values if fresh else torch.empty_like(x))

    def fused(self, y: torch.Tensor) -> Recipe | None:
        """The same, which has been bound, by one launch; None unless it is a batch norm in an arithmetic of gistkit's
        kernel alone, or its sum with another or with a kept tensor."""
        total = self._steps[1]
        forms = [self._form(part) for part in (total[1:] if total[0] == "add" else [total])]
        # addition commutes, but for which NaN it hands on: CUDA's has one NaN only
        at = next((i for i, form in enumerate(forms) if form not in ("", VALUES)), None)
        if at is None or "" in forms:
            return None
        launch = direct.Rebuilds(plane_of(*self._like[1:]), forms[at], forms[1 - at] if len(forms) == 2 else "")
        return Recipe(self._steps, self._verified, y, launch, at)

    def _form(self, part: tuple) -> str:
        arithmetic: Any = self._arithmetics[part[1]] if part[0] == "bn" else None
        return VALUES if part[0] == "stash" else arithmetic.args[0] if arithmetic in KERNEL_CANDIDATES else ""


def _values_of(kept: Any) -> tuple[torch.Tensor, bool]:
    """(values, whether they may be overwritten) of a hold: a stash, or the tensor as it is."""
    return kept.source() if type(kept) is Stash else (kept.dense(), False)


class Exactness:
    """How one ReLU's output y comes back exactly: by one launch, else operator by operator, else not at all.

    ``verified`` remembers what was found, by call, recipe and geometry; ``bind`` leads from a recipe to its body in the
    running forward. ``recipes``: those that may be exact, the quickest first."""

    def __init__(self, verified: dict, call: int, steps: tuple, y: torch.Tensor, bind: Callable[[Recipe], Any]) -> None:
        self._verified, self._y, self._bind = verified, y, bind
        self._key = ("relu", call, steps, y.dtype, y.device, tuple(y.shape), y.stride())
        by_operators = Recipe(steps, verified, y)
        bound = bind(by_operators) is not None
        self.recipes = [r for r in (by_operators.fused(y), by_operators) if r is not None] if bound else []

    def check(self) -> Recipe | None:
        """The first recipe that gives y's bits now. Synchronises where it is new."""
        if self._key not in self._verified:
            same = (same_bits(self._bind(r).dense(), self._y.detach()) for r in self.recipes)
            self._verified[self._key] = next((i for i, equal in enumerate(same) if equal), None)
        number = self._verified[self._key]
        return None if number is None or number >= len(self.recipes) else self.recipes[number]

    @property
    def known(self) -> bool:
        return self._key in self._verified

    def later(self, refuse: Callable[[], None]) -> RebuiltBody:
        """A body that compares a digest of y with what its first use in backward rebuilds, as under a budget no second
        such tensor has room in forward; ``refuse()``, which must raise, is called where no recipe is exact."""
        verified, key, y = self._verified, self._key, self._y  # the body must not hold y
        ways, expected = [self._bind(r).dense for r in self.recipes], digest(y)
        exact: list[Callable] = []

        def dense() -> torch.Tensor:
            if exact:
                return exact[0]()
            for number, way in enumerate(ways):
                values = way()
                if digest(values) == expected:
                    exact.append(way)
                    verified[key] = number
                    return values
                del values
            verified[key] = None
            refuse()
            raise AssertionError("refuse() must raise where no recipe is exact")

        return RebuiltBody(dense)
