"""Which values of forward backward can compute anew to the same bits, where they are in bf16 or fp16: docs/compiled.md,
"Rounding to bf16"."""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import fx

from gistkit.compiled import compat
from gistkit.compiled.readers import readers
from gistkit.compiled.split import Pair, elements, is_pointwise, is_tensor, is_view, origin, storage_of, value

aten = torch.ops.aten
_SELECTING = (
    aten.relu.default, aten.neg.default, aten.abs.default, aten.clone.default, aten.cat.default, aten.index.Tensor,
    aten.constant_pad_nd.default, aten.embedding.default,
)  # fmt: skip
_LOOPS_OWN = (aten.sin.default, aten.cos.default)
"""Of which a loop over vectors in C++ has other bits than one over single elements, as a rotary embedding's may be."""


def is_low(node: fx.Node) -> bool:
    """Whether a node is a tensor of bf16 or fp16."""
    return is_tensor(node) and value(node).dtype in (torch.bfloat16, torch.float16)


def rounds_within_kernels(pair: Pair) -> bool:
    """Whether a kernel can be told to round a value that it goes on with. Inductor's C++ leaves out a cast to bf16 and
    back, also that of a saved tensor, so on a CPU a value that is rounded in memory alone is not computed anew."""
    return any(is_tensor(node) and value(node).device.type != "cpu" for node in pair.inputs)


class Roundings:
    """The rounding of every low-precision value of a pair's forward, as each of its readers sees it in plain
    ``torch.compile``. ``bitwise``: forward is to be cut into the very kernels of plain ``torch.compile``, so that
    only what those write may be kept, and what is kept no more is written all the same."""

    def __init__(self, pair: Pair, bitwise: bool) -> None:
        self._bitwise, self.on_gpu = bitwise, bitwise and rounds_within_kernels(pair)
        self._never = bitwise and not self.on_gpu
        self.saved = {node.name for node in pair.tensors}
        self._wholes = {(storage_of(node), elements(node)) for node in pair.tensors}  # not parts' bases
        self._results = {node.name for node in pair.outputs if is_tensor(node)}
        self._emulated = compat.emulates_casts()
        self._rounds_saved = compat.emulates_casts(saved=True) and not self._never
        self._order = {node: i for i, node in enumerate(pair.forward.graph.nodes)}
        self._behind = _behind_kernels(pair.forward.graph, self._order)
        self.exact = cache(self._is_exact)

    def may_be_kept(self, node: fx.Node) -> bool:
        """Whether keeping a node in addition leaves forward's bits, and those of its readers, as they are."""
        if self._bitwise and (storage_of(node), elements(node)) not in self._wholes and not self._in_memory(node):
            return False
        if self.on_gpu or node.name in self.saved or not is_low(node) or self._emulated or self.exact(node):
            return True
        return all(self.seen(node, reader) for reader in readers_of(node))

    def may_be_dropped(self, node: fx.Node) -> bool:
        """Whether keeping a saved node no more leaves forward's bits as they are."""
        if self.on_gpu or not is_low(node) or self._emulated or self.exact(node):
            return True
        return all(in_memory(r) or (not self._never and self.from_memory(node, r, False)) for r in readers_of(node))

    def follows(self, node: fx.Node) -> bool:
        """Whether a node computed anew from its operands has the forward's bits."""
        if self._never and node.target in _LOOPS_OWN:
            return False
        if self._emulated or _passes(node):
            return True
        seen = {self.seen(y, node) for y in node.all_input_nodes if is_low(y)}
        return seen.isdisjoint({None, True} if self._never and not in_memory(node) else {None})

    def to_be_rounded(self, y: fx.Node, reader: fx.Node) -> bool:
        """Whether a kernel that computes both has to round y for ``reader`` by itself."""
        return is_low(y) and not self._emulated and not _passes(reader) and bool(self.seen(y, reader))

    def seen(self, y: fx.Node, reader: fx.Node) -> bool | None:
        """Whether ``reader`` sees the low-precision y rounded, where that changes it; None where Inductor chooses."""
        y = behind_views(y)
        if self.exact(y):
            return False
        saved = y.name in self.saved
        if self.from_memory(y, reader) or (saved and self._rounds_saved and is_pointwise(y)):
            return True
        return False if not saved and len(readers_of(y)) == 1 else None

    def _in_memory(self, node: fx.Node) -> bool:
        """:func:`in_memory`, but on a GPU Inductor adds the bias of a convolution, and that of a product which is not
        saved, in the kernel of what reads it."""
        if not self._bitwise or node.name in self._results or not in_memory(node):
            return in_memory(node)
        if node.target is aten.convolution.default:
            return node.args[2] is None
        return node.target is not aten.addmm.default or node.name in self.saved

    def _is_exact(self, y: fx.Node) -> bool:
        """Whether y is the same in fp32 as rounded: read from memory, or selected from values that are."""
        low = [n for n in y.all_input_nodes if is_low(n)]
        same = bool(low) and is_tensor(y) and all(value(n).dtype == value(y).dtype for n in low)
        known = (self.exact(n) or self.from_memory(behind_views(n), y) for n in low)
        return self._in_memory(y) or (selects(y) and same and all(known))

    def from_memory(self, y: fx.Node, reader: fx.Node, saved: bool = True) -> bool:
        """Whether the reader loads y: it is a kernel of its own, or behind one and y has been written by then.
        ``saved``: y may have been written because it is saved."""
        if in_memory(reader):
            return True
        apart = bool(self._behind[reader] >> self._order[y] & 1)
        return apart and self._written(y, saved) < self._order[reader]

    def _written(self, y: fx.Node, saved: bool) -> int:
        """The place in forward's order from which on y is in memory; a large number where it may never be."""
        if self._in_memory(y) or y.name in self._results or (saved and y.name in self.saved):
            return self._order[y]
        kernels = [self._order[u] for u in y.users if u.op == "call_function" and in_memory(u)]
        views = [self._written(u, saved) for u in y.users if u.op == "call_function" and is_view(u)]
        return min([*kernels, *views], default=len(self._order))


def _passes(node: fx.Node) -> bool:
    return node.target is operator.getitem or (node.op == "call_function" and is_view(node))


def selects(node: fx.Node) -> bool:
    """Whether a node's elements are those of its operands, or zero, up to their sign."""
    return node.target in _SELECTING or _passes(node)


def in_memory(node: fx.Node) -> bool:
    """Whether a node is an input, or a product, convolution or attention, a kernel of its own from memory to memory."""
    source = origin(node)
    library = compat.operators().is_compute_intensive(source) or "attention" in str(source.target)
    return library or source.op != "call_function"


def behind_views(node: fx.Node) -> fx.Node:
    """What a view is of; a node itself where it is no view."""
    while node.op == "call_function" and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def readers_of(node: fx.Node) -> set[fx.Node]:
    """What computes with a node, through views or not."""
    return {reader for user in node.users if user.op != "output" for reader in readers(user) if reader.op != "output"}


def _behind_kernels(graph: fx.Graph, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For each node, as bits, the nodes that it can only be reached from through a product, convolution or attention
    on some way: it and they are in different kernels."""
    above: dict[fx.Node, int] = {}
    behind: dict[fx.Node, int] = {}
    for node in graph.nodes:
        over = apart = 0
        for n in node.all_input_nodes:
            over |= above[n] | 1 << order[n]
            apart |= above[n] if n.op == "call_function" and in_memory(n) else behind[n]
        above[node], behind[node] = over, apart
    return behind
