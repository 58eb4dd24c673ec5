"""One compiled step: the graphs of forward and backward, and what crosses from one to the other.

AOTAutograd's order: forward returns the caller's results, then saved tensors, then opaque objects, then symbolic
numbers; backward takes the numbers, the tensors, the objects, then the incoming gradients. A saved value has the same
name on both sides. :meth:`Pair.finish` restores that order after edits, binds the symbols that new tensors' sizes are
made of, and drops what nobody reads any more."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.types import py_sym_types

from gistkit.compiled import compat

aten = torch.ops.aten


def value(node: fx.Node) -> Any:
    """The fake value of a node: what it will be at run time, without the data."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    """Whether a node stands for one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_number(node: Any) -> bool:
    """Whether a node stands for a symbolic number."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), py_sym_types)


def is_plain(node: fx.Node) -> bool:
    """Whether a node's tensor has its elements in row-major order from the beginning of its storage on."""
    x = value(node)
    fixed = all(isinstance(n, int) for n in (*x.shape, *x.stride(), x.storage_offset()))
    return fixed and x.is_contiguous() and x.storage_offset() == 0


def elements(node: fx.Node) -> int:
    """Elements of a node's tensor, by the sizes that were traced."""
    return compat.hint(value(node).numel())


def storage_bytes(node: fx.Node) -> int:
    """Bytes of the storage behind a node's tensor."""
    return compat.hint(value(node).untyped_storage().nbytes())


def storage_of(node: fx.Node) -> int:
    """The identity of the storage behind a node's tensor."""
    return compat.storage_key(value(node))


def storages(nodes: Iterable[Any]) -> dict[int, int]:
    """The storages of those nodes that stand for a tensor, with their bytes."""
    return {storage_of(node): storage_bytes(node) for node in nodes if is_tensor(node)}


def memory_order(x: torch.Tensor, channels_last: bool = False) -> tuple[int, ...]:
    """The dimensions of x from the outermost in memory to the innermost. ``channels_last``: images will lie so."""
    order = tuple(sorted(range(x.dim()), key=lambda d: (-compat.hint(x.stride(d)), d)))
    return (0, 2, 3, 1) if channels_last and order == (0, 1, 2, 3) else order


def by_row(node: fx.Node, channels_last: bool) -> bool:
    """Whether an operand of a tensor's node has an element for each of its rows, the innermost dimension in memory, as
    a layer norm's mean."""
    x = value(node)
    row = compat.hint(x.shape[memory_order(x, channels_last)[-1]]) if x.dim() else 1
    return row > 1 and any(elements(n) * row == elements(node) for n in node.all_input_nodes if is_tensor(n))


class Pair:
    """The graph modules ``forward`` and ``backward`` of one step, edited in place; ``results``: how many of forward's
    outputs are the caller's. ``saved``: the nodes of forward that are kept for backward, in order. ``whole_of``: by a
    node that is not saved the saved one that backward takes it from, as a part. ``overwritten``: inputs of forward that
    have other values by the time of backward, as a batch norm's running mean."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
        self.forward, self.backward, self.results = forward, backward, results
        outputs = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
        self.outputs, self.saved = outputs[:results], outputs[results:]
        self.inputs: list[fx.Node] = list(forward.graph.find_nodes(op="placeholder"))
        taken = [node.name for node in self.saved if isinstance(node, fx.Node)]
        found = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        states = (node for name, node in found.items() if name.startswith("rng_state_output_"))  # of a draw run anew
        self._places: dict[str, fx.Node] = {name: found[name] if name in found else next(states) for name in taken}
        self.whole_of: dict[fx.Node, fx.Node] = {}
        self.overwritten = {n.args[0] for n in forward.graph.find_nodes(op="call_function", target=aten.copy_.default)}

    @property
    def tensors(self) -> list[fx.Node]:
        return [node for node in self.saved if is_tensor(node)]

    def is_saved(self, node: fx.Node) -> bool:
        """Whether backward has a node of forward."""
        return node.name in self._places

    def held(self, node: fx.Node) -> fx.Node:
        """The node itself, or where it is not saved a saved one that has the same elements in the same order."""
        if self.is_saved(node) or not is_tensor(node) or not is_plain(node):
            return node
        same = (n for n in self.tensors if storage_of(n) == storage_of(node) and is_plain(n))
        return next((n for n in same if value(n).numel() == value(node).numel()), node)

    def place(self, node: fx.Node) -> fx.Node:
        """The placeholder of backward for a node of forward, which is saved from now on if it was not. Raises
        ValueError for an input that forward overwrites."""
        if node.name not in self._places:
            if node in self.overwritten:
                raise ValueError(f"{node.name} is overwritten in forward, so backward cannot be given it; leave it out")
            graph = self.backward.graph
            other = next((n for n in graph.nodes if n.name == node.name), None)
            if other is not None:  # the copy of the node that the cut made to run it anew
                other._rename(self.fresh_name(f"{node.name}_again"))
            with graph.inserting_before(next(iter(graph.nodes))):
                made = graph.placeholder(node.name)
            made._rename(node.name)
            made.meta = {key: item for key, item in node.meta.items() if key != "recompute"}
            self.saved.append(node)
            self._places[node.name] = made
        return self._places[node.name]

    def forget(self, node: fx.Node) -> None:
        """Save a node of forward no more; nothing in backward may read it."""
        self.backward.graph.erase_node(self._places.pop(node.name))
        self.saved.remove(node)

    def read_from(self, node: fx.Node, whole: fx.Node, made: fx.Node) -> None:
        """Save a node of forward no more, as backward has it in ``made``, a part of a saved node, ``whole``."""
        self._places[node.name].replace_all_uses_with(made)
        self.forget(node)
        self._places[node.name] = made
        self.whole_of[node] = whole

    def fresh_name(self, wish: str) -> str:
        taken = {node.name for graph in (self.forward.graph, self.backward.graph) for node in graph.nodes}
        return next(n for n in itertools.chain([wish], (f"{wish}_{i}" for i in itertools.count(1))) if n not in taken)

    def drop_unread(self) -> None:
        """Save no more what no operator of backward reads."""
        self.backward.graph.eliminate_dead_code()
        alive = set(self.backward.graph.nodes)
        for node in [n for n in self.whole_of if self._places[n.name] not in alive]:
            del self._places[node.name], self.whole_of[node]
        for node in self.tensors:
            if not self.place(node).users:
                self.forget(node)

    def finish(self) -> None:
        """Make both graphs whole after edits: order, descriptions, symbols, dead code. Compiles their code."""
        self.drop_unread()
        self._bind_symbols()
        tensors = sorted(self.tensors, key=lambda node: node.meta.get(compat.NOT_CHECKED, False))
        numbers = [n for n in self.saved if is_number(n)]
        objects = [n for n in self.saved if not is_tensor(n) and not is_number(n)]
        self.saved = [*tensors, *objects, *numbers]
        for node in reversed([*numbers, *tensors, *objects]):
            next(iter(self.backward.graph.nodes)).prepend(self._places[node.name])
        output = self.forward.graph.output_node()
        output.args = ((*self.outputs, *self.saved),)
        if output.meta.get("desc"):
            checked = [not node.meta.get(compat.NOT_CHECKED) for node in self.saved]
            described = [compat.saved_descriptor(i, flag) for i, flag in enumerate(checked)]
            output.meta["desc"] = [*list(output.meta["desc"])[: self.results], *described]
        for module in (self.forward, self.backward):
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()

    def _bind_symbols(self) -> None:
        """Save every symbol that backward's inputs have in their sizes; backward's code looks them up there."""
        places = self.backward.graph.find_nodes(op="placeholder")
        symbols = compat.part("free_symbols")
        missing = symbols([value(node) for node in places if is_tensor(node)])
        missing -= symbols([value(node) for node in self.saved if is_number(node)])
        nodes = compat.part("find_symbol_binding_fx_nodes")(self.forward.graph) if missing else {}
        for symbol in sorted(missing.intersection(nodes), key=str):
            self.place(nodes[symbol])


def origin(node: fx.Node) -> fx.Node:
    """The operator behind an element of its several results; a node itself where it is no such element."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at its first operand's memory in another way."""
    return node.op == "call_function" and node.target is not operator.getitem and compat.operators().is_view(node)


def is_pointwise(node: fx.Node) -> bool:
    """Whether Inductor makes a node with its rule for pointwise operators."""
    cast = node.target is torch.ops.prims.convert_element_type.default
    return cast or torch.Tag.pointwise in getattr(node.target, "tags", ())
