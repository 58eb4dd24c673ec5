"""Concatenations of which others are parts, as each layer of a DenseNet concatenates what the layers before it made:
backward reads the parts from the whole, and the parts are not saved. Only where bits may differ, as Inductor's kernels
then read rows that are further apart."""

from __future__ import annotations

import torch
from torch import fx

from gistkit.compiled.edit import Builder
from gistkit.compiled.forms.packing import own_tensors
from gistkit.compiled.readers import reads_memory
from gistkit.compiled.split import Pair, elements, is_view, storage_bytes, value

aten = torch.ops.aten


def read_from_wholes(pair: Pair) -> None:
    """Save parts of a saved concatenation no more where they take as many bytes as it does, or more, and where
    pointwise operators read them: a library would copy them, a view may need rows that are next to each other."""
    cats = sorted((n for n in pair.tensors if n.target is aten.cat.default), key=elements, reverse=True)
    for whole in cats:
        if whole in pair.whole_of:
            continue
        dim = _dim(whole)
        starts = _starts(whole, dim)
        alike = (n for n in own_tensors(pair) if not is_view(n) and value(n).dtype == value(whole).dtype)
        left = [n for n in alike if n is not whole and n not in pair.whole_of.values()]
        left = [n for n in left if not any(is_view(user) or reads_memory(user) for user in pair.place(n).users)]
        parts = {n: start for n in left if (start := _place(n, dim, starts)) is not None}
        if sum(map(storage_bytes, parts)) >= storage_bytes(whole):
            for part, start in parts.items():
                before = next(n for n in pair.backward.graph.nodes if n.op != "placeholder")
                build = Builder(pair.backward.graph, before, backward=True)
                stop = start + value(part).shape[dim]
                pair.read_from(part, whole, build(aten.slice.Tensor, pair.place(whole), dim, start, stop))


def _dim(cat: fx.Node) -> int:
    return (cat.args[1] if len(cat.args) > 1 else 0) % value(cat).dim()  # type: ignore[operator]


def _joined(node: fx.Node, dim: int) -> list[fx.Node]:
    """What a node is the concatenation of, also through concatenations of concatenations; else the node itself."""
    if node.target is not aten.cat.default or _dim(node) != dim:
        return [node]
    return [n for operand in node.args[0] for n in _joined(operand, dim)]  # type: ignore[union-attr,arg-type]


def _starts(whole: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """What a concatenation is made of, each with its place along ``dim``; nothing where that is not known."""
    found, start = list[tuple[fx.Node, int]](), 0
    for node in _joined(whole, dim):
        shape = value(node).shape
        if len(shape) != value(whole).dim() or not all(isinstance(n, int) for n in shape):
            return []  # torch.cat leaves out tensors of shape (0,)
        found.append((node, start))
        start += shape[dim]
    return found


def _place(part: fx.Node, dim: int, starts: list[tuple[fx.Node, int]]) -> int | None:
    """Where along ``dim`` a tensor is in the concatenation; None where it is no part of it."""
    joined, nodes = _joined(part, dim), [node for node, _ in starts]
    first = nodes.index(joined[0]) if joined[0] in nodes else 0
    return starts[first][1] if starts and nodes[first : first + len(joined)] == joined else None
