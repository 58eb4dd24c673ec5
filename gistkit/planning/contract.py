"""The contract of a plan: written when a step is planned, compared with the forward that is about to run.

:class:`gistkit.ir.Contract` says what it holds. What differs in the dataflow: :mod:`gistkit.planning.dataflow`.
"""

from __future__ import annotations

from typing import Any

from gistkit.capture import GEOMETRY, python_instead
from gistkit.errors import PlanMismatchError
from gistkit.ir import Call, Contract, PlannedCall, SavedGraph, StateTensor, scaled
from gistkit.planning.dataflow import AGAIN, check_flow, check_sources, flow

Tensors = tuple[StateTensor, ...]


def contract_of(graph: SavedGraph, sub_batches: int = 1) -> Contract:
    """The contract of a captured step that is planned in so many sub-batches. The caller of :func:`gistkit.plan` adds
    inputs, autocast and words."""
    part = scaled(graph, sub_batches)
    return Contract(
        batch=graph.batch,
        training=graph.training,
        state=graph.state,
        calls=_calls(graph),
        flow=flow(part),
        storage_bytes=tuple(s.nbytes for s in part.storages),
        saved_bytes=graph.kept_bytes,
    )


def _calls(graph: SavedGraph) -> tuple[PlannedCall, ...]:
    """The covered calls and those of which backward keeps something. The others differ between a capture of a whole
    step and one of a forward (what a custom function makes, say); their sizes are in ``storage_bytes``."""
    acting = (call for call in graph.calls if call.covered >= 0 or call.saves)
    return tuple(PlannedCall(call.op, call.module, geometry(call)) for call in acting)


def geometry(call: Call) -> dict[str, Any]:
    """The arguments of a covered call that change what it keeps, by name; nothing of another call."""
    known = call.options or {}
    return {name: known[name] for name in GEOMETRY.get(call.op, ()) if call.covered >= 0 and name in known}


def check_state(contract: Contract, state: Tensors, *, gradients: bool) -> None:
    """Raise PlanMismatchError naming the first parameter or buffer that is not as planned: its dtype, its shape and,
    with ``gradients``, whether it needs one. Names by themselves do not matter."""
    planned, now = _by_name(contract.state, gradients), _by_name(state, gradients)
    if not contract.known or list(planned.values()) == list(now.values()):
        return
    for name in (*planned, *now):
        if planned.get(name) != now.get(name):
            expected = f"{planned.get(name, 'none')} as parameter or buffer {name!r}"
            raise PlanMismatchError(expected, now.get(name, "none"), AGAIN)
    raise PlanMismatchError("the parameters and buffers in the order of the planned model", "another order", AGAIN)


def _by_name(tensors: Tensors, gradients: bool) -> dict[str, str]:
    """What each tensor is, in words."""
    grads = {t.name: f" {'with' if t.requires_grad else 'without'} a gradient" if gradients else "" for t in tensors}
    return {t.name: f"{t.dtype} of shape {t.shape}{grads[t.name]}" for t in tensors}


def check_inputs(contract: Contract, inputs: Tensors) -> None:
    """Raise PlanMismatchError where a gradient is asked for an input for which none was planned, or the other way
    round."""
    if contract.inputs is None:
        return
    planned, now = ([t.requires_grad for t in tensors] for tensors in (contract.inputs, inputs))
    if planned != now:
        expected = f"inputs that need gradients: {planned}"
        raise PlanMismatchError(expected, f"inputs that need gradients: {now}", "plan with such inputs, or detach them")


def check_forward(contract: Contract, graph: SavedGraph) -> None:
    """Raise PlanMismatchError where a captured forward is not what a budget was planned for: naming the first call that
    is another or has other strides, kernels and the like, or the first storage that is larger, or a part of which
    nothing is known."""
    if graph.scripted:
        raise PlanMismatchError(
            "a forward that Python runs, for the plan's budget",
            f"{graph.scripted[0]!r} as a scripted or traced module, of which no capture tells what it will keep",
            python_instead(graph.scripted[:1]),
        )
    if not contract.known:
        return
    _check_geometry(contract, graph)
    for what, planned, now in (
        ("calls", contract.calls, _calls(graph)),
        ("storages", contract.storage_bytes, graph.storages),
    ):
        if len(planned) != len(now):
            raise PlanMismatchError(f"a forward of {len(planned)} {what}", f"one of {len(now)}", AGAIN)
    for storage, most in zip(graph.storages, contract.storage_bytes, strict=True):
        if storage.kind in ("input", "activation") and storage.nbytes > most:
            raise PlanMismatchError(
                f"at most {most} bytes in storage {storage.id}, for the plan's budget",
                f"{storage.nbytes} ({_maker(graph, storage.producer)}, shape {storage.shape})",
                "plan for inputs of these sizes",
            )


def _check_geometry(contract: Contract, graph: SavedGraph) -> None:
    for i, (planned, now) in enumerate(zip(contract.calls, _calls(graph), strict=False)):
        if (planned.op, planned.geometry) != (now.op, now.geometry):
            raise PlanMismatchError(_call(i, planned), _call(i, now), AGAIN)


def check_same(contract: Contract, graph: SavedGraph, inputs: Tensors, autocast: str) -> None:
    """Raise PlanMismatchError naming what is another in a captured forward whose fingerprint is not the plan's: its
    mode, a call, who needs a gradient, what a call reads. ``autocast``: what is in force, in words. Nothing is raised
    where the contract does not know the step."""
    try:
        _check_same(contract, graph, inputs, autocast)
    except PlanMismatchError as error:
        if not graph.scripted:
            raise
        remedy = f"TorchScript makes other operators from one run to the next: {python_instead(graph.scripted)}"
        raise PlanMismatchError(error.expected, error.got, f"{remedy}, or leave the plan out") from None


def _check_same(contract: Contract, graph: SavedGraph, inputs: Tensors, autocast: str) -> None:
    if not contract.known:
        return
    if contract.training != graph.training:
        planned, now = ("training" if mode else "evaluation" for mode in (contract.training, graph.training))
        raise PlanMismatchError(f"a forward in {planned} mode", f"one in {now} mode", AGAIN)
    check_flow(contract, graph, autocast)
    check_state(contract, graph.state, gradients=True)
    check_inputs(contract, inputs)
    _check_geometry(contract, graph)
    check_sources(contract, graph)


def _call(index: int, call: PlannedCall) -> str:
    arguments = ", ".join(f"{name}={value}" for name, value in call.geometry.items())
    module, given = f" of {call.module!r}" if call.module else "", f" ({arguments})" if arguments else ""
    return f"call {index} to be {call.op}{module}{given}"


def _maker(graph: SavedGraph, producer: int) -> str:
    if producer < 0:
        return "an input"
    call = graph.calls[producer]
    return f"{call.op} of {call.module or 'the model'}"


__all__ = ["AGAIN", "check_forward", "check_inputs", "check_same", "check_state", "contract_of", "geometry"]
