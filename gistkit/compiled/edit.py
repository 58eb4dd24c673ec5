"""Edits of a step's graphs: a saved tensor is encoded in forward and decoded in backward, or computed anew there. They
end in :meth:`gistkit.compiled.split.Pair.finish`, once after all edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from gistkit.compiled import compat
from gistkit.compiled.operators import convolving, dividing, materialised, rounding, shortening, taking, writing
from gistkit.compiled.readers import LOADS, awaited, fuse_together, readers, reads_memory, sink_views
from gistkit.compiled.rebuilds.rounding import is_low
from gistkit.compiled.split import Pair, is_pointwise, is_tensor, is_view, memory_order, storage_bytes, value

Nodes = dict[fx.Node, fx.Node]
_ALIGNED = 8  # channels that are summed over are a multiple of it; a library pads others, which takes far longer


@dataclass(frozen=True)
class Cone:
    """How a saved tensor is computed anew in backward; all are nodes of forward.

    ``nodes`` are copied to backward: in an order in which operands come first, ``root``, the saved tensor, last.
    ``leaves``: the operands that are not copied. Those that backward does not have are saved in addition.
    ``rounded``: pairs (operand, reader) of nodes where forward reads the operand from memory, in bf16 or fp16, and
    backward's kernel would compute it in fp32; it is rounded there. ``counts``: leaves that are variances and are kept
    as moments, with what those are divided by. ``loaded``: leaves that may be rebuilt themselves, afterwards; they are
    buffers then, though Inductor could fuse them with this rebuild.
    """

    root: fx.Node
    nodes: tuple[fx.Node, ...]
    leaves: tuple[fx.Node, ...]
    rounded: frozenset[tuple[fx.Node, fx.Node]] = frozenset()
    counts: Mapping[fx.Node, float] = field(default_factory=dict)
    loaded: frozenset[fx.Node] = frozenset()


class Builder:
    """Adds operators to a graph before a node: ``build(aten.add.Tensor, a, b)`` returns it, with its fake value."""

    def __init__(self, graph: fx.Graph, before: fx.Node, backward: bool = False) -> None:
        self.graph, self.before, self._backward = graph, before, backward
        self._mode = compat.fake_mode(value(node) for node in graph.nodes)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        known_args, known_kwargs = map_arg((args, kwargs), value)
        with self._mode, torch.no_grad():
            node.meta["val"] = target(*known_args, **known_kwargs)
        if self._backward:
            node.meta["autograd_backward"] = True
        return node

    def sizes(self, x: fx.Node) -> list[Any]:
        """The shape of x: numbers, and nodes where it is symbolic."""
        shape = value(x).shape
        return [d if isinstance(d, int) else self(torch.ops.aten.sym_size.int, x, i) for i, d in enumerate(shape)]


def rebuild(pair: Pair, cone: Cone) -> None:
    """Save ``cone.root`` no more; backward computes it from the cone's leaves: once for all its readers, as a buffer of
    its own, in the layout that forward gives to what it saves, after the gradient that the first of them needs.
    Raises ValueError where ``cone.root`` is not saved, or a leaf is an input that forward overwrites."""
    if not pair.is_saved(cone.root):
        raise ValueError(f"rebuild: {cone.root.name} must be a saved tensor of the pair; take one of Pair.tensors")
    held = {leaf: pair.held(leaf) for leaf in cone.leaves}  # one of which a view is saved is read through that
    held |= {leaf: _moment(pair, leaf, count) for leaf, count in cone.counts.items()}
    places = {leaf: pair.place(node) for leaf, node in held.items()}

    def read(build: Builder, leaf: fx.Node) -> fx.Node:
        if leaf in cone.counts:
            return build(dividing(), places[leaf], cone.counts[leaf])
        made = places[leaf]
        if held[leaf] is not leaf:
            made = build(torch.ops.aten.reshape.default, made, build.sizes(leaf))
        own = [user for user in leaf.users if user in cone.nodes]
        if leaf in cone.loaded and is_low(leaf) and not all(map(reads_memory, own)):  # both may become one kernel
            made = build(rounding(), made)
            made.meta[LOADS] = True
        return made

    def make(build: Builder) -> fx.Node:
        return copied(pair, build, cone, {leaf: read(build, leaf) for leaf in cone.leaves}, apart=True)[cone.root]

    _replace(pair, cone.root, make, True)


def encode(pair: Pair, node: fx.Node, form: Any, materialise: bool | None = False) -> list[fx.Node]:
    """Save a tensor in one of :mod:`gistkit.compiled.forms`: encoded behind its producer, decoded in backward.

    ``materialise``: encoded in a kernel of its own, decoded once for all its readers, as by :func:`rebuild`. False:
    decoded before each reader, to be fused into it; readers next to each other share one. None: a buffer for the
    readers that Inductor cannot fuse and for those right behind them, copies for the others. Returns the payload, nodes
    of forward."""
    build = Builder(pair.forward.graph, _behind(node))
    payload = list(form.encode(build, node))
    if materialise:
        payload = [build(materialised(), part, node) for part in payload]
    for i, part in enumerate(payload):
        part._rename(pair.fresh_name(f"{form.name}_{node.name}_{i}"))
    places = [pair.place(part) for part in payload]
    _replace(pair, node, lambda build: form.decode(build, places), materialise)
    return payload


def written(pair: Pair, node: fx.Node, rounded: bool) -> None:
    """Have forward write a tensor that it saves no more to memory, as if it were saved, so that Inductor cuts forward
    into the kernels of plain ``torch.compile``. ``rounded``: to its own dtype for all who read it."""
    readers = [user for user in node.users if user.op != "output"]
    if not readers or node.op != "call_function":
        return
    build = Builder(pair.forward.graph, _behind(node))
    made = build(writing(), build(rounding(), node) if rounded else node)
    for reader in readers:
        reader.replace_input_with(node, made)


def early(pair: Pair) -> None:
    """Compute what only backward reads, as a mask at the end of the graph, right behind what it is made of, which need
    not live on until then. What forward reads too stays: Inductor would fuse, and add up, in another order."""
    nodes, table, kept, moved = list(pair.forward.graph.nodes), compat.operators(), set(pair.tensors), set[fx.Node]()
    for node in reversed(nodes):
        unread = all([user in moved for user in node.users if user.op != "output"] or [node in kept])
        if unread and (is_view(node) or (table.is_fusible(node) and not table.is_random(node))):
            moved.add(node)
    for node in nodes:
        if node in moved and node.all_input_nodes and (latest := max(node.all_input_nodes)).op == "call_function":
            latest.append(node)


def _moment(pair: Pair, variance: fx.Node, count: float) -> fx.Node:
    """The moment of a variance in forward's graph; made once."""
    found = next((user for user in variance.users if user.target is torch.ops.gistkit.moment.default), None)
    if found is None:
        found = Builder(pair.forward.graph, _behind(variance))(taking(), variance, count)
        found._rename(pair.fresh_name(f"moment_{variance.name}"))
    return found


def strides(pair: Pair, x: torch.Tensor, dense: bool = False) -> list[int] | None:
    """The layout that Inductor gives to what forward saves, ``dense`` without gaps; None where a size is symbolic."""
    x = torch.empty_like(x) if dense else x
    if x.dim() == 4 and memory_order(x) == (0, 1, 2, 3) and compat.prefers_channels_last(pair.forward):
        x = torch.empty_like(x, memory_format=torch.channels_last)
    return list(x.stride()) if all(isinstance(s, int) for s in x.stride()) else None


def _behind(node: fx.Node) -> fx.Node:
    after = node.next
    while after.op == "placeholder":
        after = after.next
    return after


def copied(pair: Pair, build: Builder, cone: Cone, leaves: Nodes, apart: bool = False) -> Nodes:
    """A cone's nodes, copied to backward over what stands for the leaves there. ``apart``: none but the root becomes a
    buffer, which Inductor would make in a kernel of plain torch.compile that computes the same."""
    here, rounded = Nodes(leaves), Nodes()

    def operand(n: fx.Node, reader: fx.Node) -> fx.Node:
        if (n, reader) not in cone.rounded:
            return here[n]
        if n not in rounded:
            rounded[n] = build(rounding(), here[n])
            rounded[n].meta[LOADS] = False
        return rounded[n]

    for node in cone.nodes:
        if node.op == "get_attr" and not hasattr(pair.backward, str(node.target)):
            setattr(pair.backward, str(node.target), getattr(pair.forward, str(node.target)))
        with build.graph.inserting_before(build.before):
            made = build.graph.node_copy(node, lambda n, reader=node: operand(n, reader))
        if made.target is torch.ops.aten.convolution.default:  # backward has an operator of its own for it
            x, weight, _, stride, padding, dilation, _, _, groups = made.args
            made.target, made.args = convolving(), (x, weight, stride, padding, dilation, groups)
        made.meta = {key: item for key, item in node.meta.items() if key != "recompute"}
        made.meta["autograd_backward"] = True
        made.meta[LOADS] = not cone.loaded.isdisjoint(node.all_input_nodes)
        fused = apart and is_tensor(node) and (is_pointwise(node) or is_view(node))
        if fused and max(len(set(node.users) & set(cone.nodes)), len(node.all_input_nodes)) > 1:
            made = build(shortening(), made, True)
            made.meta[LOADS] = False
        here[node] = made
    return here


def _replace(pair: Pair, node: fx.Node, make: Callable[[Builder], fx.Node], materialise: bool | None) -> None:
    """Save a node of forward no more: its readers in backward get what ``make`` makes, as a buffer in its layout."""
    graph, place = pair.backward.graph, pair.place(node)
    sink_views(place)
    users = sorted(place.users)
    from_memory = users if materialise else []
    if materialise is None:
        from_memory = [u for u in users if reads_memory(u) or u.meta.get(LOADS)]
        read = [reader for u in from_memory for reader in readers(u)]
        from_memory = [u for u in users if u in from_memory or any(r < u and fuse_together(r, u) for r in read)]
    if from_memory:
        build = Builder(graph, from_memory[0], backward=True)
        made = make(build)
        layout, after = strides(pair, value(node), dense=not materialise), awaited(place, from_memory[0]) or made
        made = build(materialised(), made, after, layout)
        for user in from_memory:
            user.replace_input_with(place, made)
    made, before = None, None
    for user in [u for u in users if u not in from_memory]:
        if made is None or before is None or not fuse_together(before, user):
            made = make(Builder(graph, user, backward=True))
        user.replace_input_with(place, made)
        before = user
    pair.forget(node)


def grows(node: fx.Node) -> bool:
    """Whether a node is a product or convolution that backward may compute anew: it makes at least twice the bytes that
    it reads. A convolution with a bias is none: Inductor adds the bias in other kernels."""
    if node.op != "call_function" or not is_tensor(node):
        return False
    if node.target is torch.ops.aten.convolution.default:
        _, weight, bias, *_, transposed, _, _ = node.args
        summed = None if bias is not None or transposed else value(weight).shape[1]  # type: ignore[arg-type]
    elif node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        summed = value(node.args[-1]).shape[0]  # type: ignore[arg-type]
    else:
        return False
    read = sum(storage_bytes(n) for n in node.all_input_nodes if is_tensor(n))
    return isinstance(summed, int) and summed % _ALIGNED == 0 and 2 * read <= storage_bytes(node)
