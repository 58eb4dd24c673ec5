"""One covered call: its step of the plan, its specialised form, its result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from gistkit.capture import BatchNorm, Bound, Conv2d, Dropout, Linear, MaxPool2d, Relu
from gistkit.ir import CallChoice
from gistkit.runtime.calls.hooks import caught, without_hooks
from gistkit.runtime.calls.kinds import SpecialisedCall, TensorKind, runs
from gistkit.runtime.calls.owned import MappedMaxPool2d, MaskedDropout
from gistkit.runtime.calls.relu import specialised_relu
from gistkit.runtime.calls.weighted import NativeBatchNorm, specialised_conv2d, specialised_linear
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.match_plan import check_call
from gistkit.runtime.program.program import Program, Step

SPECIALISE: dict[str, tuple[Callable[..., Any], Callable[[ForwardState, Step, Any], Any]]] = {
    "relu": (Relu, specialised_relu),
    "max_pool2d": (MaxPool2d, MappedMaxPool2d),
    "conv2d": (Conv2d, specialised_conv2d),
    "linear": (Linear, specialised_linear),
    "batch_norm": (BatchNorm, NativeBatchNorm),
    "dropout": (Dropout, MaskedDropout),
}
"""By covered op the form of its operands and what makes a :class:`SpecialisedCall` of state, step and operands, None
where PyTorch's own op runs. Additions are counted, for plans that name them, and run as PyTorch's own."""


class ByPyTorch(SpecialisedCall):
    """A call over operands that gistkit's operators do not take: at all (``x`` None), or an ``x`` of that kind."""

    def __init__(self, x: torch.Tensor | None) -> None:
        self._x = None if x is None else TensorKind(x)

    def fits(self, *values: Any) -> bool:
        return not runs(values) if self._x is None else self._x.fits(values[0])


def next_call(state: ForwardState, op: str, bound: Bound) -> int:
    """The number of the covered call that a function mode sees now. Where the forward leaves its plan the state goes on
    without it, or raises; under a budget the call must be the planned one in its strides and the like, too."""
    index, program = state.calls, state.program
    state.calls, state.seen = index + 1, state.seen + 1
    step = None if program is None or index >= len(program.steps) else program.steps[index]
    if program is not None and (step is None or step.op != op):
        state.diverge(f"call {index} to be {step.op if step else 'the end'}", op)
    elif program is not None and state.strict and program.plan.budget_bytes is not None:
        check_call(program, index, bound)
    return index


def run(
    state: ForwardState, program: Program | None, index: int, op: str, values: tuple, plain: Callable[[], Any]
) -> Any:
    """The covered call of that number under a program, or under none, with its operands in order; ``plain()`` runs it
    by PyTorch, its saved tensors caught as planned."""
    journey = state.journey
    if journey is not None:
        journey.reached(index)
    if state.deferred is not None and op != "max_pool2d":
        state.store_deferred()
    call = None if program is None or op == "add" else program.calls[index]
    if op != "add" and (call is None or not call.fits(*values)):
        call = _specialised(state, program, index, op, values)
    if call is None or type(call) is ByPyTorch:
        state.store_deferred()
        state.unread = op == "max_pool2d"  # its backward asks for the input's shape, as those in UNREAD do
        y = _saving(state, program, index, plain)
    else:
        if _may_save(program, index, op, values):
            y = _saving(state, program, index, partial(call, state, *values))
        elif not state.hooked:
            y = call(state, *values)
        else:
            with without_hooks(state):
                y = call(state, *values)
        if program is not None and index in program.held_outputs:
            hold_output(state, program.steps[index], y)
    if journey is not None:
        journey.ran(index, y)
    return y


def _specialised(state: ForwardState, program: Program | None, index: int, op: str, values: tuple) -> Any:
    form, specialise = SPECIALISE[op]
    step = Step(-1, op, CallChoice(-1, op), None, None) if program is None else program.steps[index]
    taken = runs(values)
    call = specialise(state, step, form(*values)) if taken else None
    if call is None:
        call = ByPyTorch(values[0] if taken else None)
    if program is not None:
        program.calls[index] = call
    return call


def _may_save(program: Program | None, index: int, op: str, values: tuple) -> bool:
    """Whether a specialised call may save what is to be caught: a pool or a dropout that runs by PyTorch after all, or
    a weight which is no parameter but made in the step."""
    if program is None or index in program.caught_within:
        made_weight = op in ("conv2d", "linear") and type(values[1]) is not torch.nn.Parameter
        return (program is not None and made_weight) or op in ("max_pool2d", "dropout")
    return False


def _saving(state: ForwardState, program: Program | None, index: int, plain: Callable[[], Any]) -> Any:
    """``plain()``; what PyTorch saves in it is kept as planned for that covered call."""
    state.instead = index
    catches = not state.hooked and (program is None or index in program.caught_within)
    try:
        with caught(state) if catches else nullcontext():
            return plain()
    finally:
        state.instead, state.unread = -1, False  # also where the call fails and the model goes on without it


def hold_output(state: ForwardState, step: Step, y: torch.Tensor) -> None:
    """Keep a hold on the output of a call of :attr:`Program.held_outputs`, if no stash has it."""
    decision = step.output
    if decision is not None and decision.storage not in state.nodes:
        state.alias(y, decision)
