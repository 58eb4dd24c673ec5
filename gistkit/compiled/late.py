"""A rebuild within a kernel that backward has anyhow, where bits may differ (``fidelity="reassociated"``, ``lossy``):
docs/compiled.md, "Where bits may differ"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx

from gistkit.compiled import compat
from gistkit.compiled.edit import Builder, Cone, copied
from gistkit.compiled.operators import rounding, writing
from gistkit.compiled.pools import stand_in
from gistkit.compiled.readers import LOADS, readers, reads_memory, sink_views
from gistkit.compiled.rebuilds.rounding import behind_views, is_low
from gistkit.compiled.split import Pair, elements, is_plain, is_pointwise, is_tensor, is_view, value

aten = torch.ops.aten
_SUMS = (aten.sum.dim_IntList, aten.sum.default)
_CONVOLUTION = aten.convolution_backward.default


def rebuild_late(pair: Pair, cone: Cone, lossy: bool = False) -> None:
    """Save ``cone.root`` no more; backward computes it where its leaves are read, or before its first reader.
    ``lossy``: what is read for its shape is a tensor that no kernel writes, as leaves will have to be decoded."""
    place = pair.place(cone.root)
    sink_views(place)
    large = [leaf for leaf in cone.leaves if is_tensor(leaf) and elements(leaf) == elements(cone.root)]
    _split_convolutions(pair, place, cone, large, lossy)
    end = _defer(pair, place, large)

    root = behind_views(cone.root)  # stored in the shape of its sources: Inductor does not fuse other loops with theirs
    same = elements(root) == elements(cone.root) and is_plain(root) and is_plain(cone.root)
    # not beside decoders: their codes and what is stored exceed the registers of a norm's kernel (docs/log.md)
    root = root if same and root in cone.nodes and not lossy else cone.root

    def make(before: fx.Node, store: bool = False) -> fx.Node:
        build = Builder(pair.backward.graph, before, backward=True)
        made = copied(pair, build, cone, {leaf: pair.place(leaf) for leaf in cone.leaves})[root]
        made = build(rounding(), made) if is_low(made) else made
        made = build(writing(), made) if store else made
        return made if root is cone.root else build(aten.reshape.default, made, build.sizes(cone.root))

    users = sorted(place.users)
    if any(reads_memory(u) or u.meta.get(LOADS) for u in users):
        made = make(users[0], store=True)
        place.replace_all_uses_with(made)
        if not _store_shared(pair.backward.graph, made) and end is not None:
            _divide(pair.backward.graph, made, end, make)
    else:
        for user in users:
            user.replace_input_with(place, make(user))
    pair.forget(cone.root)


def _library(node: fx.Node) -> bool:
    return compat.operators().is_compute_intensive(node)


def _next_call(node: fx.Node) -> fx.Node | None:
    """The first call of a library that follows from a node, or is it."""
    return min(filter(_library, _dependents([node])), default=None)


def _dependents(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What is computed from nodes, themselves included."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "output":
            found.add(node)
            stack.extend(node.users)
    return found


def _split_convolutions(pair: Pair, place: fx.Node, cone: Cone, large: list[fx.Node], lossy: bool) -> None:
    """Make two calls of each convolution's backward that reads ``place`` and gives two gradients. That of the input
    reads but the shape and layout of ``place``, and is given another tensor that has both."""
    x = value(cone.root)
    likes = (n for n in large if value(n).shape == x.shape and value(n).stride() == x.stride())
    same = next((n for n in likes if value(n).dtype == x.dtype), None)
    graph = pair.backward.graph
    for node in list(place.users) if same is not None else ():
        if node.target is not _CONVOLUTION or node.args[1] is not place or not all(node.args[10][:2]):  # type: ignore[index]
            continue
        bias = node.args[10][2]  # type: ignore[index]
        for mask, elements_of in (([True, False, False], (0,)), ([False, True, bias], (1, 2))):
            with graph.inserting_before(node):
                made = graph.node_copy(node)
            made.update_arg(10, mask)
            made.meta["val"] = tuple(v if keep else None for v, keep in zip(value(node), mask, strict=True))
            if mask[0] and not ((lossy or same in pair.whole_of) and stand_in(pair, made, x)):
                made.update_arg(1, pair.place(same))  # type: ignore[arg-type]
            for item in [u for u in node.users if u.args[1] in elements_of]:
                item.update_arg(0, made)
        graph.erase_node(node)


def _defer(pair: Pair, place: fx.Node, large: list[fx.Node]) -> fx.Node | None:
    """Move weights' gradients that read ``place`` behind the next kernels that read what it is rebuilt from. Returns
    the library's call that follows those; None where nothing moves."""
    users = sorted(place.users)
    late = [r for u in users if reads_memory(u) for r in readers(u) if _library(r)]
    moved = _dependents(late)
    if not late or any(_library(n) for n in moved - set(late)) or any(u.meta.get(LOADS) and u < late[0] for u in users):
        return None
    hosts = [r for leaf in large if pair.is_saved(leaf) for u in pair.place(leaf).users for r in readers(u)]
    hosts = [h for h in hosts if max(late) < h and LOADS not in h.meta and not _library(h)]
    end = _next_call(min(hosts)) if hosts else None
    if end is None:
        return None
    views = {u for u in users if is_view(u) and set(readers(u)) <= set(late)}
    for node in sorted(n for n in moved | views if n < end):
        end.prepend(node)
    return end


def _store_shared(graph: fx.Graph, made: fx.Node) -> bool:
    """Have the first value that is computed from ``made``, of its size, be written where it is read before and behind
    the next call of a library; whether there is one."""
    known = {made}
    for node in [u for u in made.users if _fused(u)]:
        end = _next_call(node) or node
        for n in _between(node.prev, end):
            if known.isdisjoint(n.all_input_nodes) or not _fused(n):
                continue
            known.add(n)
            if is_tensor(n) and elements(n) == elements(made) and any(end < u for u in n.users if u.op != "output"):
                with graph.inserting_after(n):
                    stored = graph.call_function(writing(), (n,))
                stored.meta = dict(n.meta)
                n.replace_all_uses_with(stored, delete_user_cb=lambda u, own=stored: u is not own)
                return True
    return False


def _divide(graph: fx.Graph, made: fx.Node, end: fx.Node, make: Callable[[fx.Node], fx.Node]) -> None:
    """Give each sum before ``end`` of what is computed from ``made`` a copy of its own of that."""
    inside = [made]
    for node in _between(made, end):
        if not set(inside).isdisjoint(node.all_input_nodes) and _fused(node):
            inside.append(node)
    for total in [n for n in _between(made, end) if n.target in _SUMS and n.args[0] in inside]:
        here = {made: make(total)}
        for node in inside:  # what the sum does not need is dead code
            if made < node < total:
                with graph.inserting_before(total):
                    here[node] = graph.node_copy(node, lambda n, here=here: here.get(n, n))
        total.update_arg(0, here[total.all_input_nodes[0]])


def _between(first: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    while (first := first.next) is not end:
        yield first


def _fused(node: fx.Node) -> bool:
    return node.op == "call_function" and LOADS not in node.meta and (is_view(node) or is_pointwise(node))
