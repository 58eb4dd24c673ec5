"""The peak of a compiled step, predicted from its two graphs.

Counted are forward's inputs (parameters, buffers, the batch), what is kept between the graphs, gradients, and the
buffers that live at a time. What a library reads or writes is a buffer, as is what a reduction makes, and a pointwise
value that Inductor would not compute in each of its readers. A buffer is freed behind the last kernel that reads it,
also through values without a buffer; a pointwise kernel that reads one of its size for the last time writes to that.
:mod:`bench.compiled_peaks` compares this with Inductor's code; docs/compiled.md says what is not seen."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from gistkit.compiled import compat, operators  # noqa: F401 (defines the operator)
from gistkit.compiled.forms.packing import own_tensors
from gistkit.compiled.rebuilds.rounding import readers_of
from gistkit.compiled.split import Pair, elements, is_tensor, is_view, storage_of, storages

_WRITTEN = ("gistkit.materialised.default", "gistkit.written.default", "aten.cat.default", "aten.scatter_add.default",
            "aten.index_put.default")  # fmt: skip
"""Operators that write a buffer and compute their operands within the same kernel."""
_UNWRITTEN = "prims._low_memory_max_pool_offsets_to_indices.default", "aten.empty_strided.default"
_SMALL, _NEAR = 6, 32  # what joins kernels is more than a 64th of the largest tensor; they are no further apart
_SHARED_READS = 4  # Inductor's realize_reads_threshold: what several read becomes a buffer where it takes more reads


class _Kernel(NamedTuple):
    """What computes a node: the storages that it writes, with their bytes, and reads; ``joined`` where it does others'
    work as well, and then it overwrites none of them."""

    node: fx.Node
    made: dict[int, int]
    reads: frozenset[int]
    joined: bool = False


def predicted_peak(pair: Pair) -> int:
    """Bytes at the peak of a step of a pair, which may be in the middle of edits."""
    held = storages(pair.inputs)
    forward = _peak(pair.forward.graph, held, set(storages((*pair.tensors, *pair.outputs))))
    results = set(storages(tree_leaves(pair.backward.graph.output_node().args[0])))
    # the caller's results live on, as the loss does; what is kept is freed behind its last reader
    fixed = held | storages(pair.outputs)
    places = {pair.place(node) for node in pair.tensors}
    tangents = (n for n in pair.backward.graph.find_nodes(op="placeholder") if n not in places)
    start = storages(map(pair.place, own_tensors(pair))) | storages(tangents)
    return max(forward, sum(fixed.values()) + _peak(pair.backward.graph, start, results, set(fixed)))


def _peak(graph: fx.Graph, start: dict[int, int], stay: set[int], elsewhere: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    """The most bytes alive at a kernel: ``start`` is there from the beginning, ``stay`` to the end, ``elsewhere`` is
    counted by the caller. Forward's inputs are not freed: the caller holds them."""
    inputs_stay = not elsewhere
    kernels = _ordered(_kernels(graph, stay), {} if inputs_stay else start)
    last = {key: kernel.node for kernel in kernels for key in (*kernel.made, *kernel.reads)}
    ends: dict[fx.Node, list[int]] = {}
    for key, node in last.items():
        if key not in stay and not (inputs_stay and key in start):
            ends.setdefault(node, []).append(key)
    alive, before = dict(start), frozenset[int]()
    total = peak = sum(alive.values())
    for kernel in kernels:
        made = {key: size for key, size in kernel.made.items() if key not in alive and key not in elsewhere}
        freed = ends.get(kernel.node, ())
        if _is_pointwise(kernel.node) and not kernel.joined:  # overwrites an operand, but none that the kernel before, fused with it, reads
            own = (alive.pop(key) for key in freed if key not in before and alive.get(key) in made.values())
            total -= next(own, 0)
        before = kernel.reads
        alive |= made
        total += sum(made.values())
        peak = max(peak, total)
        for key in freed:
            total -= alive.pop(key, 0)
    return peak


def _ordered(kernels: list[_Kernel], start: dict[int, int]) -> list[_Kernel]:
    """The kernels in an order of less memory, as Inductor looks for: in forward, what makes less than it reads, as a
    mask, right behind that; what nothing else waits for and takes more than what it is made of, as casts of gradients,
    at the end. ``start``: in backward, what can be freed from the beginning on."""
    size = start | {key: size for kernel in kernels for key, size in kernel.made.items()}
    kernels = _joined(kernels, size) if start else kernels
    awaited: set[int] = set()
    late = set()
    for kernel in reversed(kernels):
        if awaited.isdisjoint(kernel.made) and sum(kernel.made.values()) > sum(size.get(k, 0) for k in kernel.reads):
            late.add(kernel.node)
        else:
            awaited |= kernel.reads
    places: dict[int, tuple[int, ...]] = {}
    found: list[tuple[tuple[int, ...], int]] = []
    for i, (node, made, reads, _) in enumerate(kernels):
        place = (len(kernels), i) if node in late else (i,)
        sources = [key for key in reads if key in places]
        if place == (i,) and not start and _is_fusible(node) and any(sum(made.values()) < size[s] for s in sources):
            place = (*max(places[key] for key in sources), i)
        places.update(dict.fromkeys(made, place))
        found.append((place, i))
    return [kernels[i] for _, i in sorted(found)]


def _joined(kernels: list[_Kernel], size: dict[int, int]) -> list[_Kernel]:
    """The kernels, some of them in one, at the last one's place, as Inductor fuses those of one shape that read a tensor
    as large as any of theirs and do not wait for each other: the gradients of both norms behind a residual sum."""
    largest = [max((size.get(key, 0) for key in k.reads), default=0) for k in kernels]
    least, maker, behind = max(largest, default=0) >> _SMALL, dict[int, int](), list[int]()
    found: list[_Kernel | None] = list(kernels)
    for j, kernel in enumerate(kernels):
        sources = {maker[key] for key in kernel.reads if key in maker}
        behind.append(functools.reduce(operator.or_, (behind[s] | 1 << s for s in sources), 0))
        maker |= dict.fromkeys(kernel.made, j)
        if largest[j] <= least or not _is_fusible(kernel.node):
            continue
        for i in range(j - 1, max(-1, j - _NEAR), -1):
            if (other := found[i]) is None or behind[j] >> i & 1 or largest[i] != largest[j]:
                continue
            shared = max((size.get(key, 0) for key in other.reads & kernel.reads), default=0)
            alike = _is_fusible(other.node) and sum(other.made.values()) == sum(kernel.made.values())
            if shared == largest[j] and alike:
                kernel = _Kernel(kernel.node, other.made | kernel.made, other.reads | kernel.reads, True)
                found[i], found[j] = None, kernel
                behind[j] |= behind[i]
    order, missing, waiting = list[_Kernel](), set(maker), list[_Kernel]()
    for kernel in filter(None, found):  # what reads a kernel that was joined to a later one comes behind that
        late, waiting = [*waiting, kernel], []
        for k in late:
            ready = not any(key in missing and key not in k.made for key in k.reads)
            (order if ready else waiting).append(k)
            missing.difference_update(k.made if ready else ())
    return order


def _kernels(graph: fx.Graph, stay: set[int]) -> list[_Kernel]:
    """The kernels of a graph. ``loads``: the storages that a reader of a node loads; ``counted``: the same as Inductor
    counts them, a decoder as one."""
    loads: dict[fx.Node, frozenset[int]] = {}
    counted: dict[fx.Node, frozenset[int]] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    kernels: dict[tuple[int, int], _Kernel] = {}
    for node in graph.nodes:
        if node.op == "output":  # in the middle of edits it still names what is not kept any more
            continue
        loads[node] = frozenset().union(*(loads[n] for n in node.all_input_nodes))
        counted[node] = frozenset().union(*(counted[n] for n in node.all_input_nodes))
        if node.op != "call_function" or node.target is operator.getitem:
            loads[node] = counted[node] = frozenset({storage_of(node)} if is_tensor(node) else ())
            continue
        if is_view(node) or str(node.target) in _UNWRITTEN:
            continue
        if node.target is torch.ops.gistkit.short.default:
            counted[node] = frozenset({storage_of(node)})
            continue
        first = node
        if _is_pointwise(node) and storage_of(node) not in stay and str(node.target) not in _WRITTEN:
            readers, waits = readers_of(node), torch.ops.gistkit.materialised.default
            read = any(not _is_fusible(n) or (n.target is waits and n.args[0] is not node) for n in readers)
            if not read and (len(readers) == 1 or len(counted[node]) <= _SHARED_READS):
                continue
            first = min(node.users) if len(node.users) == 1 else node  # it becomes a buffer when that is lowered
        made = storages([node] if is_tensor(node) else node.users)
        kernels[order[first], order[node]] = _Kernel(node, made, loads[node])
        loads[node] = counted[node] = frozenset(made)
    return [kernels[place] for place in sorted(kernels)]


def _is_fusible(node: fx.Node) -> bool:
    """Whether Inductor itself writes the kernel of a node, which computes the operands too."""
    own = str(node.target).startswith("gistkit.") and node.target is not torch.ops.gistkit.convolved.default
    return own or str(node.target) in _WRITTEN or compat.operators().is_fusible(node)


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a fusible node makes as many elements as it reads."""
    read = filter(is_tensor, node.all_input_nodes)
    return is_tensor(node) and _is_fusible(node) and all(elements(n) <= elements(node) for n in read)
