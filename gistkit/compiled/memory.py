"""The peak of a compiled step, predicted from its two graphs.

Counted are forward's inputs (parameters, buffers, the batch), what is kept between the graphs, gradients, and the
buffers that live at a time: what a library reads or writes, what a reduction makes, and a pointwise value that Inductor
would not compute in each of its readers; under a budget the workspace of convolutions and attentions too, measured on
the GPU. :mod:`bench.compiled_peaks` compares this with Inductor's code."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from gistkit.compiled import compat, operators  # noqa: F401 (defines the operator)
from gistkit.compiled.forms.packing import own_tensors
from gistkit.compiled.rebuilds.rounding import readers_of
from gistkit.compiled.split import Pair, elements, is_tensor, is_view, storage_of, storages
from gistkit.compiled.workspace import Workspace
from gistkit.planning.fused_kernels import Kernel, peak

_WRITTEN = ("gistkit.materialised.default", "gistkit.written.default", "aten.cat.default", "aten.scatter_add.default",
            "aten.index_put.default")  # fmt: skip
"""Operators that write a buffer and compute their operands within the same kernel."""
_UNWRITTEN = "prims._low_memory_max_pool_offsets_to_indices.default", "aten.empty_strided.default"
_FUSIBLE: dict[object, bool] = {}
_NO_WORKSPACE = Workspace((), False)
_SHARED_READS = 4  # Inductor's realize_reads_threshold: what several read becomes a buffer where it takes more reads


def predicted_peak(pair: Pair, reruns: bool = False, workspace: Workspace = _NO_WORKSPACE) -> int:
    """Bytes at the peak of a step of a pair, which may be in the middle of edits. ``reruns``: segments run again;
    ``workspace``: measures what libraries and the allocator need beside, which is left out without."""
    held, stay = workspace.blocks(pair.inputs), set(storages((*pair.tensors, *pair.outputs)))
    forward = peak(_kernels(pair.forward.graph, stay, workspace), held, stay)
    results = set(storages(tree_leaves(pair.backward.graph.output_node().args[0])))
    # the caller's results live on, as the loss does; what is kept is freed behind its last reader
    fixed = held | workspace.blocks(pair.outputs)
    places = {pair.place(node) for node in pair.tensors}
    tangents = (n for n in pair.backward.graph.find_nodes(op="placeholder") if n not in places)
    start = workspace.blocks([*map(pair.place, own_tensors(pair)), *tangents])
    backward = peak(_kernels(pair.backward.graph, results, workspace), start, results, set(fixed), reruns)
    return max(forward, sum(fixed.values()) + backward)


def _kernels(graph: fx.Graph, stay: set[int], workspace: Workspace) -> list[Kernel]:
    """The kernels of a graph. ``loads``: the storages that a reader of a node loads; ``counted``: the same as Inductor
    counts them, a decoder as one."""
    loads, counted = dict[fx.Node, frozenset[int]](), dict[fx.Node, frozenset[int]]()
    order = {node: i for i, node in enumerate(graph.nodes)}
    kernels: dict[tuple[int, int], Kernel] = {}
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
        made = workspace.blocks([node] if is_tensor(node) else node.users)
        kernel = Kernel(made, loads[node], _is_pointwise(node), _is_fusible(node), passing=workspace.bytes(node))
        kernels[order[first], order[node]] = kernel
        loads[node] = counted[node] = frozenset(made)
    return [kernels[place] for place in sorted(kernels)]


def _is_fusible(node: fx.Node) -> bool:
    """Whether Inductor itself writes the kernel of a node, which computes the operands too."""
    if node.target not in _FUSIBLE:
        own = str(node.target).startswith("gistkit.") and node.target is not torch.ops.gistkit.convolved.default
        _FUSIBLE[node.target] = own or str(node.target) in _WRITTEN or compat.operators().is_fusible(node)
    return _FUSIBLE[node.target]


def _is_pointwise(node: fx.Node) -> bool:
    """Whether a fusible node makes as many elements as it reads."""
    read = filter(is_tensor, node.all_input_nodes)
    return is_tensor(node) and _is_fusible(node) and all(elements(n) <= elements(node) for n in read)
