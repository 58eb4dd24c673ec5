"""What differs between the forward that was planned and the one that runs.

Their fingerprints differ, and the plan's contract has the planned forward's calls in order. Sizes may differ, as a last
batch is smaller; an empty one has another graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from gistkit.errors import PlanMismatchError
from gistkit.ir import Call, Contract, DataflowCall, SavedGraph
from gistkit.planning.forms import OBSERVERS

AGAIN = "make the plan from this model, in this mode, with a batch of this kind"


def flow(graph: SavedGraph) -> tuple[DataflowCall, ...]:
    """The calls of a forward, those left out by which somebody watches it."""
    wrote: dict[int, int] = {}
    found: list[DataflowCall] = []
    for call in graph.calls:
        if call.op in OBSERVERS:
            continue
        made = graph.values[call.results[0]] if call.results else None
        read = (s for s in call.reads if graph.storages[s].kind not in ("parameter", "buffer"))
        sources = tuple(sorted({wrote.get(s, -1) for s in read}))
        result = (made.dtype, made.shape) if made else ("", ())
        found.append(DataflowCall(_op(call), call.module, *result, sources))
        wrote |= dict.fromkeys(call.writes, len(found) - 1)
    return tuple(found)


def _op(call: Call) -> str:
    return f"{call.op} in place" if call.inplace else call.op


def check_flow(contract: Contract, graph: SavedGraph, autocast: str) -> None:
    """Raise PlanMismatchError naming the first call of a captured forward that is not the planned one: another op,
    another dtype, an empty result. ``autocast`` says in words what is in force."""
    planned, now = contract.flow, flow(graph)
    for i, (expected, got) in enumerate(zip_longest(planned, now) if planned else ()):
        if expected is None or got is None:
            raise PlanMismatchError(_ended(i, expected, planned), _ended(i, got, now), AGAIN)
        if expected.op != got.op:
            raise PlanMismatchError(_result(i, expected), _result(i, got), AGAIN)
        if expected.dtype != got.dtype:
            remedy = f"run it in the dtypes and under the autocast that were planned, or plan in these ({autocast})"
            if contract.autocast not in ("", autocast):
                remedy = f"it was planned under {contract.autocast}: run it so, or plan it under {autocast}"
            raise PlanMismatchError(_result(i, expected), _result(i, got), remedy)
        if 0 in got.shape and 0 not in expected.shape:
            raise PlanMismatchError(_result(i, expected), f"{_result(i, got)}, an empty one", "leave empty batches out")


def check_sources(contract: Contract, graph: SavedGraph) -> None:
    """Raise PlanMismatchError naming the first call that reads what another call made than in the plan; the calls are
    those of the plan."""
    now = flow(graph)
    for i, (expected, got) in enumerate(zip(contract.flow, now, strict=False)):
        if expected.sources != got.sources:
            where = f"call {i}, {_call(got)}, to read the results of"
            raise PlanMismatchError(f"{where} {_sources(expected, contract.flow)}", _sources(got, now), AGAIN)


def _result(index: int, call: DataflowCall) -> str:
    return f"call {index} to be {_call(call)}{f' making {call.dtype} of shape {call.shape}' if call.dtype else ''}"


def _call(call: DataflowCall) -> str:
    return f"{call.op}{f' of {call.module!r}' if call.module else ''}"


def _ended(index: int, call: DataflowCall | None, calls: Sequence[DataflowCall]) -> str:
    if call is not None:
        return _result(index, call)
    return f"the end after call {index - 1}, {_call(calls[-1])}" if calls else "a forward without a call"


def _sources(call: DataflowCall, calls: Sequence[DataflowCall]) -> str:
    named = (f"call {i}, {_call(calls[i])}" if i >= 0 else "what the forward was given" for i in call.sources)
    return " and ".join(named) or "none"


__all__ = ["AGAIN", "check_flow", "check_sources", "flow"]
