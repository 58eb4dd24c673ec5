"""A convolution's algorithms as moves of `optimal`: each of its tasks picks one by itself, as moDNN's do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gistkit.ir import CallChoice, SavedGraph
from gistkit.planning.cost import Algorithm, CostTable, by_part, of_part
from gistkit.planning.policies.optimal.problem import Move, Part


def algorithm_moves(graph: SavedGraph, costs: CostTable, task: int) -> tuple[Move, ...]:
    """The algorithms of a convolution's task that are worth a choice: the default, which is no choice, and those that
    no other beats or equals in both seconds and workspace."""
    known = costs.algorithms[task]
    default, call = known[0], graph.calls[graph.tasks[task].call]
    name = graph.tasks[task].part_name
    moves = [Move(Part())]
    for number, a in enumerate(known):
        if any(_beats(b, a) for b in known) or any(_equal(b, a) for b in known[:number]):
            continue
        more, extra = a.workspace_bytes - default.workspace_bytes, a.seconds - default.seconds
        part = Part(((task, task, more),) if more else (), ((task, extra),) if extra else ())
        if part != Part():
            moves.append(Move(part, choice=CallChoice(call.covered, call.op, algorithm=f"{name}={a.name}")))
    return tuple(moves)


def joined(algorithms: Iterable[str], parts: Sequence[str]) -> str:
    """The text for what several moves of one call choose, each for a part of its own: one name where all ``parts`` of
    the call choose the same."""
    text = ",".join(a for a in algorithms if a)
    names = {part: of_part(text, part) for part in parts}
    return by_part(names) if text and all(names.values()) else text


def chosen(group: tuple[Move, ...], algorithms: Mapping[int, str]) -> int:
    """The move of a group of :func:`algorithm_moves` that a plan takes whose calls run under ``algorithms``, by covered
    call; the default where it takes one that no move stands for."""
    for number, move in enumerate(group):
        if move.choice is not None:
            part, _, name = move.choice.algorithm.partition("=")
            if of_part(algorithms.get(move.choice.covered, ""), part) == name:
                return number
    return 0


def _equal(a: Algorithm, b: Algorithm) -> bool:
    return (a.seconds, a.workspace_bytes) == (b.seconds, b.workspace_bytes)


def _beats(a: Algorithm, b: Algorithm) -> bool:
    return not _equal(a, b) and a.seconds <= b.seconds and a.workspace_bytes <= b.workspace_bytes
