"""Which values of forward a kernel of its own computes to the same bits, and what it has to read for that:
docs/compiled.md, "The same arithmetic"."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from gistkit.compiled import compat
from gistkit.compiled.edit import strides
from gistkit.compiled.rebuilds.rounding import Roundings, behind_views, in_memory, is_low, readers_of, selects
from gistkit.compiled.split import Pair, is_pointwise, is_tensor, is_view, origin, storage_of, value

aten, prims = torch.ops.aten, torch.ops.prims
_ADDING = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar})
_NO_PRODUCT = _ADDING | {
    prims.convert_element_type.default, aten.where.self, aten.maximum.default, aten.minimum.default,
    aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.full.default, aten.rsqrt.default,
}  # fmt: skip
_SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default, aten.amax.default, aten.amin.default})
_MASKED = frozenset({
    aten.cat.default, aten.constant_pad_nd.default, aten.index.Tensor, aten.embedding.default,
    aten._unsafe_index.Tensor,
})  # fmt: skip
APART, WITHIN, UNCERTAIN = "apart", "within", "uncertain"
"""Where a norm is normalised: in a kernel that loads the statistics, in the one that makes them, or in either."""
_PERSISTENT, _UNROLLED = 1024, 8
"""Values that one kernel holds to reduce them; fewer than the second are summed one by one."""


class Arithmetic:
    """The arithmetic of a pair's forward; all follows where ``bitwise`` is not set."""

    def __init__(self, pair: Pair, bitwise: bool) -> None:
        self._pair, self.roundings, self._on = pair, Roundings(pair, bitwise), bitwise
        self._first_view = {storage_of(node): node for node in sorted(pair.tensors, reverse=True)}
        self.statistic, self.place = cache(self._statistic), cache(self._place)

    def follows(self, node: fx.Node, inlined: bool = False) -> bool:
        """Whether a node computed anew has forward's bits; ``inlined``: as a reader of it computes it."""
        if not self.roundings.follows(node):
            return False
        if not self._on or node.op != "call_function" or is_view(node) or not is_tensor(node):
            return True
        if not inlined and self.statistic(node) is not None and storage_of(node) in self._first_view:
            return False  # computed where the reduction is
        return self._adds_alike(node) and all(self._reads_alike(y, node) for y in node.all_input_nodes if is_tensor(y))

    def inlined(self, y: fx.Node, reader: fx.Node) -> bool:
        """Whether ``reader`` computes a value of statistics within its own kernel, though y is kept."""
        y = behind_views(y)
        norm = self.statistic(y) if self._on else None
        return norm is not None and self.place(norm) == APART and is_pointwise(y) and self._before_saved(y, reader)

    def count_of(self, node: fx.Node) -> float | None:
        """What Inductor divides a moment by to make a variance that a kernel of its own reads; None for other nodes."""
        if not self._on or not _is_statistic(node) or node.args[1] != 0 or storage_of(node) in self._first_view:
            return None  # or it is in memory itself
        norm: Any = node.args[0]
        count, correction, dtype = _count(norm), norm.kwargs.get("correction", 1), value(norm.args[0]).dtype
        if self.place(norm) != APART or not isinstance(count, int) or count < _UNROLLED or dtype is not torch.float32:
            return None
        return float(max(count - (1 if correction is None else correction), 0)) or None

    def _statistic(self, node: fx.Node) -> fx.Node | None:
        """The ``var_mean`` that a small value is computed from, pointwise and with nothing larger; None of others."""
        if _is_statistic(node):
            return node.args[0]  # type: ignore[return-value]
        if not is_tensor(node) or not (is_pointwise(node) or is_view(node)):
            return None
        known = (y for y in node.all_input_nodes if is_tensor(y) and self.statistic(y) is not None)
        return next((self.statistic(y) for y in known if value(y).numel() == value(node).numel()), None)

    def _reads_alike(self, y: fx.Node, node: fx.Node) -> bool:
        base = behind_views(y)
        if _is_statistic(base) and base.args[1] == 0 and self._before_saved(base, node):
            return False  # it divides the moment itself
        norm = self.statistic(base)
        sure = _made_alike(base) if norm is None else self.place(norm) != UNCERTAIN and not self._divided(base, node)
        return sure or self.roundings.from_memory(base, node)

    def _divided(self, y: fx.Node, node: fx.Node) -> bool:
        """Whether the kernel that sums divides and adds in one operation; a mean of a power of two values is exact."""
        if node.target not in _ADDING or not self.roundings.on_gpu or not _is_statistic(y):
            return False
        norm: Any = y.args[0]
        return bool(self.place(norm) == WITHIN and (y.args[1] == 0 or _count(norm) & (_count(norm) - 1)))

    def _before_saved(self, y: fx.Node, reader: fx.Node) -> bool:
        """Whether a view of y is saved in its place, and ``reader`` comes before that."""
        first = self._first_view.get(storage_of(y))
        return first is not None and y.name not in self.roundings.saved and reader < first

    def _adds_alike(self, node: fx.Node) -> bool:
        """Whether both kernels make one operation of a sum and one product (``alpha`` makes one), or neither does."""
        products = [self._products(y, node) for y in node.all_input_nodes if is_tensor(y) and node.target in _ADDING]
        return None not in products and sum(filter(None, products)) + ("alpha" in node.kwargs) <= 1

    def _products(self, y: fx.Node, node: fx.Node) -> int | None:
        """How many products that its own kernel makes a sum adds by reading y, 0 or 1; None if kernels may differ."""
        while y.op == "call_function" and (is_view(y) or y.target is prims.convert_element_type.default):
            if self.roundings.to_be_rounded(y, node) or (y.name in self.roundings.saved and is_low(y)):
                return 0
            if len(readers_of(y)) > 1 and _product_behind(y) is not None:
                return None
            y = y.all_input_nodes[0]
        if _product_behind(y) is None or self.roundings.from_memory(y, node) or self.roundings.exact(y):
            return 0
        return 1 if len(readers_of(y)) == 1 and y.name not in self.roundings.saved else None

    def _is_masked(self, x: fx.Node, norm: fx.Node) -> bool:
        """Whether a concatenation or a lookup is computed in the kernel that reduces x: then it is a loop."""
        stack, seen = [x], set()
        while stack:
            node = stack.pop()
            if node not in seen and not in_memory(node) and not self.roundings.from_memory(node, norm):
                if node.target in _MASKED:
                    return True
                seen.add(node)
                stack.extend(n for n in node.all_input_nodes if is_tensor(n))
        return False

    def _place(self, norm: fx.Node) -> str:
        """Where a ``var_mean``'s results are read, as far as is known. Over the last of four dimensions it is not where
        Inductor lays out images anew: those may be channels, and lie otherwise than strides say."""
        x, dims = _reduced(norm)
        tensor, layout = value(x), strides(self._pair, value(x))
        if layout is None or not all(isinstance(n, int) for n in tensor.shape):
            return UNCERTAIN
        if tensor.dim() == 4 and dims == {3} and compat.prefers_channels_last(self._pair.forward):
            return UNCERTAIN
        inner_first = sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=lambda d: layout[d])
        if not inner_first or inner_first[0] not in dims:
            return APART
        reduced = [d for d in inner_first if d in dims]
        contiguous = inner_first[: len(reduced)] == reduced and layout[inner_first[0]] == 1
        return WITHIN if contiguous and _count(norm) <= _PERSISTENT and not self._is_masked(x, norm) else UNCERTAIN


def _is_statistic(node: fx.Node) -> bool:
    return origin(node) is not node and origin(node).target is aten.var_mean.correction


def _count(norm: fx.Node) -> Any:
    x, dims = _reduced(norm)
    return prod(value(x).shape[d] for d in dims)


def _reduced(norm: fx.Node) -> tuple[fx.Node, set[int]]:
    x: Any = norm.args[0]
    rank = value(x).dim()
    given = norm.args[1] if len(norm.args) > 1 else norm.kwargs.get("dim")
    return x, {d % rank for d in (range(rank) if given is None else given)}  # type: ignore[union-attr,operator]


def _product_behind(node: fx.Node) -> fx.Node | None:
    """A node, or what it casts or looks at, where its last operation may be a product."""
    while node.op == "call_function" and (is_view(node) or node.target is prims.convert_element_type.default):
        node = node.all_input_nodes[0]
    return node if is_pointwise(node) and node.target not in _NO_PRODUCT and not selects(node) else None


@cache
def copies() -> frozenset:
    """Operators besides the pointwise ones that read and write memory and compute next to nothing."""
    return _MASKED | {
        aten.clone.default, aten.full.default, aten.scalar_tensor.default, aten.arange.start_step, prims.iota.default,
        prims.inductor_lookup_seed.default, prims.inductor_random.default, prims.convert_element_type.default,
    }  # fmt: skip


def _made_alike(y: fx.Node) -> bool:
    """Whether all lanes and all kernels have the same of a value, whether it is loaded or computed where it is read:
    if it is no pointwise operator's, it is copied, drawn, chosen or summed in one order by all lanes."""
    source = origin(y)
    known = in_memory(source) or is_pointwise(source) or selects(source) or source.target in copies() | _SUMS
    return known or source.target is prims._low_memory_max_pool_with_offsets.default
