"""What a plan was made for, as far as its fingerprint does not say it: written when it is planned, compared before it
is carried out.

A fingerprint leaves sizes out, so that a last, smaller batch runs under the plan of the others. What a budget relies on
besides is told here: parameters and buffers by name, the calls with their strides and kernels, the bytes of every
storage (of one sub-batch), the mode. ``flow`` (:mod:`gistkit.planning.dataflow`) says what differs where the
fingerprints do. Plain lists and numbers, as JSON has them.
"""

from __future__ import annotations

from typing import Any

from gistkit.capture import GEOMETRY, python_instead
from gistkit.errors import PlanMismatchError
from gistkit.ir import Call, SavedGraph, StateTensor, scaled
from gistkit.planning.dataflow import AGAIN, check_flow, check_sources, flow

Entry = tuple[str, tuple[int, ...], bool]


def made_for(graph: SavedGraph, sub_batches: int = 1) -> dict[str, Any]:
    """The record of a captured step that is planned in so many sub-batches. Which inputs need gradients, by tensor
    among the arguments, who has the batch may add as ``inputs``."""
    part = scaled(graph, sub_batches)
    return {
        "training": graph.training,
        "state": [[t.name, t.dtype, list(t.shape), t.requires_grad] for t in graph.state],
        "calls": _calls(graph),
        "bytes": [s.nbytes for s in part.storages],
        "flow": flow(part),
    }


def _calls(graph: SavedGraph) -> list[list]:
    """The covered calls and those of which backward keeps something. Of the others a capture of a whole step sees
    another part than one of a forward: what a custom function makes, say; their sizes are in ``bytes``."""
    acting = (call for call in graph.calls if call.covered >= 0 or call.saves)
    return [[call.op, call.module, geometry(call)] for call in acting]


def geometry(call: Call) -> dict[str, Any]:
    """The arguments of a covered call that change what it keeps, by name; nothing of another call."""
    told = call.options or {}
    return {name: told[name] for name in GEOMETRY.get(call.op, ()) if call.covered >= 0 and name in told}


def check_state(record: dict[str, Any], state: tuple[StateTensor, ...], *, gradients: bool) -> None:
    """Raise PlanMismatchError naming the first parameter or buffer that is not as planned: its dtype, its shape and,
    with ``gradients``, whether it needs one. Names by themselves do not matter."""
    planned = {name: (dtype, tuple(shape), grad and gradients) for name, dtype, shape, grad in record.get("state", ())}
    now = {t.name: (t.dtype, t.shape, t.requires_grad and gradients) for t in state}
    if not record or list(planned.values()) == list(now.values()):
        return
    for name in (*planned, *now):
        if planned.get(name) != now.get(name):
            expected, got = _tensor(planned.get(name), gradients), _tensor(now.get(name), gradients)
            raise PlanMismatchError(f"{expected} as parameter or buffer {name!r}", got, AGAIN)
    raise PlanMismatchError("the parameters and buffers in the order of the planned model", "another order", AGAIN)


def _tensor(entry: Entry | None, gradients: bool) -> str:
    if entry is None:
        return "none"
    dtype, shape, grad = entry
    return f"{dtype} of shape {shape}" + (f" {'with' if grad else 'without'} a gradient" if gradients else "")


def check_inputs(record: dict[str, Any], trains: list[bool]) -> None:
    """Raise PlanMismatchError where a gradient is asked for an input for which none was planned, or the other way
    round; ``trains``: by tensor among the arguments."""
    if record.get("inputs", trains) != trains:
        planned, now = (f"inputs that need gradients: {flags}" for flags in (record["inputs"], trains))
        raise PlanMismatchError(planned, str(now), "plan with such inputs, or detach them")


def check_forward(record: dict[str, Any], graph: SavedGraph) -> None:
    """Raise PlanMismatchError where a captured forward is not what a budget was planned for: naming the first call that
    is another or has other strides, kernels and the like, or the first storage that is larger, or a part of which
    nothing is known."""
    if graph.scripted:
        raise PlanMismatchError(
            "a forward that Python runs, for the plan's budget",
            f"{graph.scripted[0]!r} as a scripted or traced module, of which no capture tells what it will keep",
            python_instead(graph.scripted[:1]),
        )
    if not record:
        return
    _check_geometry(record, graph)
    for name, now in (("calls", _calls(graph)), ("bytes", graph.storages)):
        if len(record[name]) != len(now):
            what = "calls" if name == "calls" else "storages"
            raise PlanMismatchError(f"a forward of {len(record[name])} {what}", f"one of {len(now)}", AGAIN)
    for storage, most in zip(graph.storages, record["bytes"], strict=True):
        if storage.kind in ("input", "activation") and storage.nbytes > most:
            raise PlanMismatchError(
                f"at most {most} bytes in storage {storage.id}, for the plan's budget",
                f"{storage.nbytes} ({_maker(graph, storage.producer)}, shape {storage.shape})",
                "plan for inputs of these sizes",
            )


def _check_geometry(record: dict[str, Any], graph: SavedGraph) -> None:
    for i, (planned, now) in enumerate(zip(record["calls"], _calls(graph), strict=False)):
        if (planned[0], planned[2]) != (now[0], now[2]):
            raise PlanMismatchError(_call(i, *planned), _call(i, *now), AGAIN)


def check_same(record: dict[str, Any], graph: SavedGraph, trains: list[bool], autocast: str) -> None:
    """Raise PlanMismatchError naming what is another in a captured forward whose fingerprint is not the plan's: its
    mode, a call, who needs a gradient, what a call reads. ``trains``: which tensors among the arguments need one;
    ``autocast``: what is in force, in words. Nothing is raised where the record does not tell."""
    try:
        _check_same(record, graph, trains, autocast)
    except PlanMismatchError as error:
        if not graph.scripted:
            raise
        remedy = f"TorchScript makes other operators from one run to the next: {python_instead(graph.scripted)}"
        raise PlanMismatchError(error.expected, error.got, f"{remedy}, or leave the plan out") from None


def _check_same(record: dict[str, Any], graph: SavedGraph, trains: list[bool], autocast: str) -> None:
    if not record:
        return
    if record["training"] != graph.training:
        planned, now = ("training" if mode else "evaluation" for mode in (record["training"], graph.training))
        raise PlanMismatchError(f"a forward in {planned} mode", f"one in {now} mode", AGAIN)
    planned = record.get("flow", ())
    if planned:
        check_flow(planned, graph, autocast)
    check_state(record, graph.state, gradients=True)
    check_inputs(record, trains)
    _check_geometry(record, graph)
    check_sources(planned, graph)


def _call(index: int, op: str, module: str, told: dict[str, Any]) -> str:
    words = ", ".join(f"{name}={value}" for name, value in told.items())
    return f"call {index} to be {op}{f' of {module!r}' if module else ''}{f' ({words})' if words else ''}"


def _maker(graph: SavedGraph, producer: int) -> str:
    if producer < 0:
        return "an input"
    call = graph.calls[producer]
    return f"{call.op} of {call.module or 'the model'}"


__all__ = ["AGAIN", "check_forward", "check_inputs", "check_same", "check_state", "geometry", "made_for"]
