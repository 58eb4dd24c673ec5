"""Which saved tensors may be rounded: delayed precision reduction (Gist section IV-A) in compiled graphs.

Forward computes with exact values; what it saves for backward is rounded. Exact stay masks, maps and indices, what is
small, what follows from parameters alone (their casts and transposes), the statistics of an attention, and what
backward exponentiates: an error in logits would be a factor in the softmax's gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx

from gistkit.compiled.forms.narrow import FLOATS, Narrow
from gistkit.compiled.readers import readers, reads_memory
from gistkit.compiled.split import Pair, elements, is_tensor, value
from gistkit.formats import SCALE_BLOCK

aten, prims = torch.ops.aten, torch.ops.prims
LEAST_ELEMENTS = 4096
_ON_THE_WAY = (aten.mul.Tensor, aten.div.Tensor, prims.convert_element_type.default, aten.view.default,
               aten.reshape.default, aten.permute.default)  # fmt: skip


def of_parameters(pair: Pair, static_inputs: Collection[int]) -> set[fx.Node]:
    """Nodes of forward that follow from its static inputs, parameters and buffers, alone."""
    found = {node for i, node in enumerate(pair.inputs) if i in static_inputs}
    for node in pair.forward.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def stays_exact(pair: Pair, node: fx.Node, static: Collection[fx.Node]) -> str | None:
    """Why a saved tensor is not rounded, None where it may be."""
    if not is_tensor(node) or value(node).dtype not in FLOATS:
        return "no float"
    if elements(node) < LEAST_ELEMENTS:
        return f"fewer than {LEAST_ELEMENTS} elements"
    if node in static:
        return "follows from parameters alone"
    if node.target is operator.getitem and node.args[1] != 0 and "attention" in str(node.args[0].target):  # type: ignore
        return "a statistic of an attention"
    return "backward exponentiates it" if _exponentiated(pair.place(node)) else None


def own_kernels(pair: Pair, node: fx.Node, form: Narrow) -> int:
    """How many kernels of its own a rounding takes: one to decode what a library reads; one to encode, unless Inductor
    puts that into a kernel that reads the tensor, whose rows fit into blocks of a scale and are not summed in it."""
    row = form.shape[-1]
    fits = not form.scaled or SCALE_BLOCK % row == 0 or row % SCALE_BLOCK == 0
    read = [r for u in node.users if u.op != "output" for r in readers(u) if not reads_memory(r)]
    read = [r for u in read for r in (u.users if u.target is prims.convert_element_type.default else [u])]
    sums = any(elements(n) * row == elements(node) for r in read for n in (r, *r.users) if is_tensor(n))
    return (not read or not fits or sums) + any(map(reads_memory, pair.place(node).users))


def _exponentiated(node: fx.Node, steps: int = 5) -> bool:
    """Whether the difference of a node and something is exponentiated, as by a softmax."""
    for user in node.users if steps else ():
        if user.target is aten.sub.Tensor and any(u.target is aten.exp.default for u in user.users):
            return True
        if user.target in (*_ON_THE_WAY, aten.sub.Tensor) and _exponentiated(user, steps - 1):
            return True
    return False
