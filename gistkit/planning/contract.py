"""The contract of a plan (:class:`gistkit.ir.Contract`): written when a step is planned, compared with the forward that
is about to run. Sizes may differ, for a last batch; an empty one has another graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from gistkit.capture import GEOMETRY
from gistkit.errors import PlanMismatchError
from gistkit.ir import BACKWARD, Contract, PlannedCall, SavedGraph, StateTensor, scaled
from gistkit.planning.forms import OBSERVERS

AGAIN = "make the plan from this model, in this mode, with a batch of this kind"
Tensors = tuple[StateTensor, ...]


def contract_of(graph: SavedGraph, sub_batches: int = 1) -> Contract:
    """The contract of a captured step that is planned in so many sub-batches. The caller of :func:`gistkit.plan` adds
    inputs, autocast and what it asked for."""
    part = scaled(graph, sub_batches)
    return Contract(
        batch=graph.batch,
        training=graph.training,
        state=graph.state,
        calls=_calls(part),
        storage_bytes=tuple(s.nbytes for s in part.storages),
        saved_bytes=graph.kept_bytes,
    )


def task_calls(graph: SavedGraph) -> dict[str, Any]:
    """For a plan that sends to the host: by task its covered call, and the first task of backward."""
    calls = tuple(graph.calls[t.call].covered if t.call >= 0 else -1 for t in graph.tasks)
    first = next((t.index for t in graph.tasks if t.phase == BACKWARD), len(graph.tasks))
    return {"task_calls": calls, "backward_from": first}


def _calls(graph: SavedGraph) -> tuple[PlannedCall, ...]:
    """The calls of which backward keeps something. Of the others a capture of a whole step may see more than one of a
    forward (what a custom function makes, say); their sizes are in ``Contract.storage_bytes``."""
    found: list[PlannedCall] = []
    for call in graph.calls:
        if call.op in OBSERVERS or (call.covered < 0 and not call.saves):
            continue
        made = graph.values[call.results[0]] if call.results else None
        known = call.options or {} if call.covered >= 0 else {}
        geometry = {name: known[name] for name in GEOMETRY.get(call.op, ()) if name in known}
        op = f"{call.op} in place" if call.inplace else call.op
        found.append(PlannedCall(op, call.module, *((made.dtype, made.shape) if made else ("", ())), geometry))
    return tuple(found)


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
    grads = {t.name: f" {'with' if t.requires_grad else 'without'} a gradient" if gradients else "" for t in tensors}
    return {t.name: f"{t.dtype} of shape {t.shape}{grads[t.name]}" for t in tensors}


def check_inputs(contract: Contract, inputs: Tensors) -> None:
    """Raise PlanMismatchError where gradients are asked for other inputs than planned."""
    planned, now = ([t.requires_grad for t in tensors or ()] for tensors in (contract.inputs, inputs))
    if contract.inputs is not None and planned != now:
        what = "inputs that need gradients:"
        raise PlanMismatchError(f"{what} {planned}", f"{what} {now}", "plan with such inputs, or detach them")


def check_forward(contract: Contract, graph: SavedGraph) -> None:
    """Raise PlanMismatchError where a captured forward is not what a budget was planned for: naming the first call that
    is another or has other strides, kernels and the like, or the first storage that is larger."""
    if not contract.known:
        return
    _check_calls(contract, graph)
    planned, now = len(contract.storage_bytes), len(graph.storages)
    if planned != now:
        raise PlanMismatchError(f"a forward of {planned} storages", f"one of {now}", AGAIN)
    for storage, most in zip(graph.storages, contract.storage_bytes, strict=True):
        if storage.kind in ("input", "activation") and storage.nbytes > most:
            maker = graph.calls[storage.producer] if storage.producer >= 0 else None
            made = f"{maker.op} of {maker.module or 'the model'}" if maker is not None else "an input"
            raise PlanMismatchError(
                f"at most {most} bytes in storage {storage.id}, for the plan's budget",
                f"{storage.nbytes} ({made}, shape {storage.shape})",
                "plan for inputs of these sizes",
            )


def check_same(contract: Contract, graph: SavedGraph, inputs: Tensors, autocast: str) -> None:
    """Raise PlanMismatchError naming what is another in a captured forward whose fingerprint is not the plan's: its
    mode, a call, who needs a gradient. ``autocast``: the one in force. Nothing is raised where the step is unknown."""
    if contract.known:
        if contract.training != graph.training:
            planned, now = ("training" if mode else "evaluation" for mode in (contract.training, graph.training))
            raise PlanMismatchError(f"a forward in {planned} mode", f"one in {now} mode", AGAIN)
        _check_calls(contract, graph, autocast)
        check_state(contract, graph.state, gradients=True)
        check_inputs(contract, inputs)


def _check_calls(contract: Contract, graph: SavedGraph, autocast: str | None = None) -> None:
    """Another op, other strides, kernels and the like, an empty result. With ``autocast`` another dtype, too."""
    planned, now = contract.calls, _calls(graph)
    for i, (expected, got) in enumerate(zip_longest(planned, now)):
        texts = _result(i, expected, planned), _result(i, got, now)
        if expected is None or got is None or expected.op != got.op:
            raise PlanMismatchError(*texts, AGAIN)
        if autocast is not None and expected.dtype != got.dtype:
            remedy = f"run it in the planned dtypes, or plan in these ({autocast})"
            if contract.autocast not in ("", autocast):
                remedy = f"it was planned under {contract.autocast}: run it so, or plan it under {autocast}"
            raise PlanMismatchError(*texts, remedy)
        if 0 in got.shape and 0 not in expected.shape:
            raise PlanMismatchError(texts[0], f"{texts[1]}, an empty one", "leave empty batches out")
        if expected.geometry != got.geometry:
            given = (", ".join(f"{name}={value}" for name, value in c.geometry.items()) for c in (expected, got))
            wanted, had = (f"call {i} to be {_name(c)} ({g})" for c, g in zip((expected, got), given, strict=True))
            raise PlanMismatchError(wanted, had, AGAIN)


def _name(call: PlannedCall) -> str:
    return f"{call.op}{f' of {call.module!r}' if call.module else ''}"


def _result(index: int, call: PlannedCall | None, calls: Sequence[PlannedCall]) -> str:
    if call is not None:
        return f"call {index} to be {_name(call)}{f' making {call.dtype} of shape {call.shape}' if call.dtype else ''}"
    return f"the end after call {index - 1}, {_name(calls[-1])}" if calls else "a forward without a call"
