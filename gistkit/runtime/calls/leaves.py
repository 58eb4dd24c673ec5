"""Modules whose forward is one covered call, while a compressed forward runs: the instance has a ``forward`` of ours.

:class:`Leaf` runs the call as it ran when a function mode saw it, in a forward that is interposed on at its sites
alone; :class:`KnownLeaf` past the function mode of one that is interposed on as a whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from gistkit.capture import bind
from gistkit.runtime.calls.hooks import top_hooks
from gistkit.runtime.calls.interpose import Interposer
from gistkit.runtime.calls.kinds import runs
from gistkit.runtime.calls.run import hold_output, run
from gistkit.runtime.calls.weighted import NativeBatchNorm
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Program
from gistkit.runtime.recompute.tape import Tape

_gradients = torch.is_grad_enabled
_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_pop_mode = torch._C._pop_torch_function_stack  # type: ignore[attr-defined]
_push_mode = torch._C._push_on_torch_function_stack  # type: ignore[attr-defined]


class Running(threading.local):
    """The state of this thread's compressed forward."""

    state: ForwardState | None = None


running = Running()
Operands = Callable[[Any, torch.Tensor], tuple | None]


def _weights(m: Any, x: torch.Tensor) -> tuple:
    own = m._parameters
    return x, own["weight"], own["bias"]


def _conv2d(m: Any, x: torch.Tensor) -> tuple:
    own = m._parameters
    return x, own["weight"], own["bias"], m.stride, m.padding, m.dilation, m.groups


def _max_pool2d(m: Any, x: torch.Tensor) -> tuple | None:
    where = m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices
    return bind(F.max_pool2d, (x, *where), None)


LEAVES: dict[type, tuple[str, Operands]] = {
    nn.ReLU: ("relu", lambda m, x: (x, m.inplace)),
    nn.Conv2d: ("conv2d", _conv2d),
    nn.Linear: ("linear", _weights),
    nn.MaxPool2d: ("max_pool2d", _max_pool2d),
    nn.Dropout: ("dropout", lambda m, x: (x, m.p, m.training, m.inplace)),
    nn.BatchNorm1d: ("batch_norm", _weights),
    nn.BatchNorm2d: ("batch_norm", _weights),
    nn.BatchNorm3d: ("batch_norm", _weights),
}
"""Modules whose forward is one covered call, and what gives its operands: None where the call would be another."""
OVERRIDING = frozenset(
    "forward _conv_forward _check_input_dim weight bias running_mean running_var num_batches_tracked".split()
)
"""Attributes that, on an instance, change what a leaf's forward does."""


def library() -> tuple:
    """What the leaves' forwards call and are; somebody may put others in."""
    functions = F.relu, F.conv2d, F.linear, F.max_pool2d, F.dropout, F.batch_norm, nn.Conv2d._conv_forward
    return (*functions, *[kind.forward for kind in LEAVES])


LIBRARY = library()


class Site:
    """A module of the model whose forward is ours while the model's runs. ``calls``: its covered calls, in order, of
    which it makes ``expected`` in a forward; ``guards``: attributes that, on an instance, change what that does."""

    guards = frozenset(("forward",))

    def __init__(self, module: nn.Module, program: Program, calls: Iterable[int]) -> None:
        self.ref, self.kind, self.plain = weakref.ref(module), type(module), type(module).forward
        self.module: Any = None
        self.at = 0
        self._program, self._calls = program, tuple(calls)
        self.expected = len(self._calls)

    def __reduce__(self) -> tuple:
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Any:
    """Of a copy that is made within a compressed forward."""
    return type(module).forward.__get__(module)


class Leaf(Site):
    """A module whose forward is one covered call; it may run several times in a forward."""

    guards = OVERRIDING

    def __init__(self, module: nn.Module, program: Program, calls: Iterable[int]) -> None:
        super().__init__(module, program, calls)
        self._op, self._operands = LEAVES[self.kind]
        self._interposed = program.interposed_calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, at, module = running.state, self.at, self.module
        if (
            state is None or kwargs or not args or args[1:] or not _gradients() or top_hooks(False) is not None
            or _transforms() or forward_ad._current_level >= 0
        ):  # fmt: skip
            return self.plain(module, *args, **kwargs)
        self.at = at + 1
        state.seen += 1
        x = args[0]
        if at >= self.expected or type(x) is not torch.Tensor:
            return self.plain(module, x)
        index, program = self._calls[at], self._program
        state.calls = index + 1
        if state.deferred is None and index not in self._interposed:  # another call of the module is interposed on
            return self.plain(module, x)
        call = program.calls[index]
        y = None if call is None or state.deferred is not None else call.at(state, module, x)
        if y is None:
            return self._by_operands(state, index, x)
        if index in program.held_outputs:
            hold_output(state, program.steps[index], y)
        return y

    def _by_operands(self, state: ForwardState, index: int, x: torch.Tensor) -> Any:
        program, module, values = self._program, self.module, self._operands(self.module, x)
        if values is None:
            return self.plain(module, x)
        if self._op != "batch_norm":
            return run(state, program, index, self._op, values, partial(self.plain, module, x))
        call = program.calls[index]
        if call is None and runs(values):
            call = program.calls[index] = NativeBatchNorm(state, program.steps[index], None)
        return call.at(state, module, x) if type(call) is NativeBatchNorm else self.plain(module, x)


_AS_CALLED: dict[str, Callable[[Any, torch.Tensor], tuple[Any, tuple, dict]]] = {
    "relu": lambda m, x: (F.relu, (x,), {"inplace": m.inplace}),
    "conv2d": lambda m, x: (F.conv2d, _conv2d(m, x), {}),
    "linear": lambda m, x: (F.linear, _weights(m, x), {}),
}
"""The call that such a leaf's forward makes, for those that may run anew unseen by the function mode."""


class KnownLeaf(Leaf):
    """The same in a forward that is interposed on as a whole: it runs the call whose turn it is past the function mode,
    where that is of its op and specialised for such operands. The mode sees what else it does."""

    def __init__(self, module: nn.Module, program: Program) -> None:
        super().__init__(module, program, ())
        self._as_called = _AS_CALLED.get(self._op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, module = running.state, self.module
        if (
            _is_compiling() or state is None or state.deferred is not None or kwargs or len(args) != 1 or not _modes()
            or type(args[0]) is not torch.Tensor or not _gradients() or top_hooks(False) is not None or _transforms()
            or forward_ad._current_level >= 0
        ):  # fmt: skip
            return self.plain(module, *args, **kwargs)
        index, program = state.calls, self._program
        y, mode = None, _pop_mode()
        try:
            its_turn = state.program is program and index < len(program.steps) and program.steps[index].op == self._op
            if its_turn and type(mode) is Interposer and mode.state is state:
                y = self._known(state, index, args[0])
        finally:
            _push_mode(mode)
        return self.plain(module, *args) if y is None else y

    def _known(self, state: ForwardState, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The covered call of that number; None where it cannot be run so."""
        program, journey, tape = self._program, state.journey, state.tape
        call = program.calls[index]
        if call is None:
            return None
        if journey is not None:
            journey.reached(index)
        y = call.at(state, self.module, x) if tape is None else self._on(tape, call, state, index, x)
        if y is not None:
            state.calls, state.seen = index + 1, state.seen + 1
            if journey is not None:
                journey.ran(index, y)
            if index in program.held_outputs:
                hold_output(state, program.steps[index], y)
        return y

    def _on(self, tape: Tape, call: Any, state: ForwardState, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The call, written down where a segment needs it."""
        module, number = self.module, self._program.covered[index].index
        counts = self._op == "batch_norm" and module.training and module.num_batches_tracked is not None
        written = number in tape.watched
        if not tape.is_next(number, counts) or (written and self._as_called is None):
            return None
        if not written:
            y = call.at(state, module, x)
            if y is not None:
                tape.skipped(number, counts)
            return y
        tape.begin(*self._as_called(module, x))  # type: ignore[misc]
        y = call.at(state, module, x)
        tape.undo() if y is None else tape.end(y)
        return y
