"""What differs between the forward that was planned and the one that runs, in words.

A fingerprint says that they do. The record of a plan (:mod:`gistkit.planning.contract`) has the forward's calls as
well:
op, module, what the call returns first, and which earlier calls its operands come from. Sizes may differ, as a last
batch is smaller; an empty one has another graph.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from gistkit.errors import PlanMismatchError
from gistkit.ir import Call, SavedGraph
from gistkit.planning.forms import OBSERVERS

AGAIN = "make the plan from this model, in this mode, with a batch of this kind"
Entry = list[Any]
"""``[op, module, dtype, shape, sources]``: of the first result ('' and [] without one); ``sources`` are the numbers of
the entries that last wrote what the call reads, -1 for what the forward was given."""


def flow(graph: SavedGraph) -> list[Entry]:
    """The calls of a forward, those left out by which somebody watches it."""
    wrote: dict[int, int] = {}
    found: list[Entry] = []
    for call in graph.calls:
        if call.op in OBSERVERS:
            continue
        made = graph.values[call.results[0]] if call.results else None
        read = (s for s in call.reads if graph.storages[s].kind not in ("parameter", "buffer"))
        sources = sorted({wrote.get(s, -1) for s in read})
        found.append([_op(call), call.module, made.dtype if made else "", list(made.shape) if made else [], sources])
        wrote |= dict.fromkeys(call.writes, len(found) - 1)
    return found


def _op(call: Call) -> str:
    return f"{call.op} in place" if call.inplace else call.op


def check_flow(planned: list[Entry], graph: SavedGraph, autocast: str) -> None:
    """Raise PlanMismatchError naming the first call of a captured forward that is not the planned one: another op,
    another dtype, an empty result. ``autocast`` says in words what is in force."""
    told = flow(graph)
    for i, (expected, got) in enumerate(zip_longest(planned, told)):
        if expected is None or got is None:
            raise PlanMismatchError(_ended(i, expected, planned), _ended(i, got, told), AGAIN)
        if expected[0] != got[0]:
            raise PlanMismatchError(_told(i, expected), _told(i, got), AGAIN)
        if expected[2] != got[2]:
            remedy = f"run it in the dtypes and under the autocast that were planned, or plan in these ({autocast})"
            raise PlanMismatchError(_told(i, expected), _told(i, got), remedy)
        if 0 in got[3] and 0 not in expected[3]:
            raise PlanMismatchError(_told(i, expected), f"{_told(i, got)}, an empty one", "leave empty batches out")


def check_sources(planned: list[Entry], graph: SavedGraph) -> None:
    """Raise PlanMismatchError naming the first call that reads what another call made than in the plan; the calls are
    those of the plan."""
    told = flow(graph)
    for i, (expected, got) in enumerate(zip(planned, told, strict=False)):
        if expected[4] != got[4]:
            where = f"call {i}, {_call(got)}, to read the results of"
            raise PlanMismatchError(f"{where} {_sources(expected, planned)}", _sources(got, told), AGAIN)


def _told(index: int, entry: Entry) -> str:
    return f"call {index} to be {_call(entry)}{f' making {entry[2]} of shape {tuple(entry[3])}' if entry[2] else ''}"


def _call(entry: Entry) -> str:
    return f"{entry[0]}{f' of {entry[1]!r}' if entry[1] else ''}"


def _ended(index: int, entry: Entry | None, entries: list[Entry]) -> str:
    if entry is not None:
        return _told(index, entry)
    return f"the end after call {index - 1}, {_call(entries[-1])}" if entries else "a forward without a call"


def _sources(entry: Entry, entries: list[Entry]) -> str:
    named = (f"call {i}, {_call(entries[i])}" if i >= 0 else "what the forward was given" for i in entry[4])
    return " and ".join(named) or "none"


__all__ = ["AGAIN", "check_flow", "check_sources", "flow"]
