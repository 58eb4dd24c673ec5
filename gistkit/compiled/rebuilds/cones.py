"""The choice of rebuilds for a cut pair of graphs, as cones of its nodes, and carried out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from gistkit.compiled import edit
from gistkit.compiled.rebuilds.arithmetic import Arithmetic
from gistkit.compiled.rebuilds.flow import TWIN, describe
from gistkit.compiled.split import Pair
from gistkit.planning.flow import Limits
from gistkit.planning.rebuilds import Choice, Cone, choose


def planned(pair: Pair, limits: Limits, static_inputs: Collection[int] | None = None) -> tuple[Choice, list[edit.Cone]]:
    """The choice of rebuilds for a pair, and its cones as nodes of forward, those that read a rebuilt tensor before
    its own. ``static_inputs``: indices of forward's inputs that outlive the step."""
    choice = choose(describe(pair, static_inputs, limits), limits)
    arithmetic = Arithmetic(pair, limits.bitwise)
    named = {node.name: node for node in pair.forward.graph.nodes}
    return choice, [_as_nodes(cone, named, arithmetic) for cone in reversed(choice.cones)]


def readers_first(cones: Iterable[edit.Cone]) -> list[edit.Cone]:
    """Cones in their order, but those that read a rebuilt tensor before its own."""
    cones, done = list(cones), dict[fx.Node, edit.Cone]()

    def put(cone: edit.Cone) -> None:
        for reader in cones:
            if cone.root in reader.loaded:
                put(reader)
        done.setdefault(cone.root, cone)

    for cone in cones:
        put(cone)
    return list(done.values())


def _as_nodes(cone: Cone, named: dict[str, fx.Node], arithmetic: Arithmetic) -> edit.Cone:
    nodes = tuple(dict.fromkeys(named[name.removesuffix(TWIN)] for name in cone.nodes))
    inside, leaves = set(nodes), tuple(named[name] for name in cone.leaves)
    pairs = [(operand, node) for node in nodes for operand in node.all_input_nodes if operand in inside]
    rounded = frozenset(pair for pair in pairs if arithmetic.roundings.to_be_rounded(*pair))
    counts = {leaf: count for leaf in leaves if (count := arithmetic.count_of(leaf)) is not None}
    return edit.Cone(named[cone.root], nodes, leaves, rounded, counts, frozenset(named[n] for n in cone.rebuilt_leaves))
