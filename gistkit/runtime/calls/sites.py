"""Where a model is interposed on: only the modules between which something is kept in another form.

Most covered calls are made by a module that is exactly a ``nn.ReLU``, a ``nn.Conv2d`` or the like. While a compressed
forward runs, such a module's instance has a ``forward`` of ours (:class:`Leaf`) that runs the call as it ran when a
function mode saw it (:mod:`gistkit.runtime.calls.run`); outside the forward it is untouched, its class always. A call
that other code makes, as a function or a tensor method, is seen by a function mode around the forward of the innermost
module that makes it (:class:`Area`). What neither needs runs as plain PyTorch, unseen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from gistkit.capture import bind
from gistkit.nn.eligible import transformed
from gistkit.runtime.calls.batch_norm import NativeBatchNorm
from gistkit.runtime.calls.hooks import caught, pack_known
from gistkit.runtime.calls.interpose import Interposer, interposed
from gistkit.runtime.calls.kinds import runs
from gistkit.runtime.calls.run import hold_output, run
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Program

_top = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_gradients = torch.is_grad_enabled
_transforms = torch._C._are_functorch_transforms_active
_is_compiling = torch.compiler.is_compiling
_modes = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_pop_mode = torch._C._pop_torch_function_stack  # type: ignore[attr-defined]
_push_mode = torch._C._push_on_torch_function_stack  # type: ignore[attr-defined]


class _Running(threading.local):
    state: ForwardState | None = None


_running = _Running()
Operands = Callable[[Any, torch.Tensor], tuple | None]


def _weights(m: Any, x: torch.Tensor) -> tuple:
    own = m._parameters
    return x, own["weight"], own["bias"]


def _conv2d(m: Any, x: torch.Tensor) -> tuple:
    own = m._parameters
    return x, own["weight"], own["bias"], m.stride, m.padding, m.dilation, m.groups


def _max_pool2d(m: Any, x: torch.Tensor) -> tuple | None:
    where = m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices
    return bind("max_pool2d", F.max_pool2d, (x, *where), None)


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


def _library() -> tuple:
    """What the leaves' forwards call and are; somebody may put others in."""
    functions = F.relu, F.conv2d, F.linear, F.max_pool2d, F.dropout, F.batch_norm, nn.Conv2d._conv_forward
    return (*functions, *[kind.forward for kind in LEAVES])


_LIBRARY = _library()


class _Site:
    """A module of the model whose forward is ours while the model's runs. ``calls``: its covered calls, in order, of
    which it makes ``expected`` in a forward; ``guards``: attributes that, on an instance, change what that does."""

    guards = frozenset(("forward",))

    def __init__(self, module: nn.Module, program: Program, calls: Iterable[int]) -> None:
        self.ref, self.kind, self.plain = weakref.ref(module), type(module), type(module).forward
        self.module: Any = None
        self.at = 0
        self._program, self._calls = program, tuple(calls)
        self.expected = len(self._calls)

    def __deepcopy__(self, memo: dict) -> Any:
        return _own_forward(memo[id(self.module)])

    def __reduce__(self) -> tuple:
        return _own_forward, (self.module,)


def _own_forward(module: nn.Module) -> Any:
    """Of a copy that is made within a compressed forward."""
    return type(module).forward.__get__(module)


class Leaf(_Site):
    """A module whose forward is one covered call; it may run several times in a forward."""

    guards = OVERRIDING

    def __init__(self, module: nn.Module, program: Program, calls: Iterable[int]) -> None:
        super().__init__(module, program, calls)
        self._op, self._operands = LEAVES[self.kind]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, at, module = _running.state, self.at, self.module
        if (
            state is None or kwargs or len(args) != 1 or not _gradients() or _top(False) is not None
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


class KnownLeaf(_Site):
    """The same in a forward that is interposed on as a whole: it runs the call whose turn it is past the function mode,
    where that is of its op and specialised for such operands. The mode sees what else it does."""

    guards = OVERRIDING

    def __init__(self, module: nn.Module, program: Program, calls: Iterable[int]) -> None:
        super().__init__(module, program, calls)
        self._op = LEAVES[self.kind][0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, module = _running.state, self.module
        if (
            _is_compiling() or state is None or state.deferred is not None or kwargs or len(args) != 1 or not _modes()
            or type(args[0]) is not torch.Tensor or not _gradients() or _top(False) is not None or _transforms()
            or forward_ad._current_level >= 0
        ):  # fmt: skip
            return self.plain(module, *args, **kwargs)
        index, program, journey = state.calls, self._program, state.journey
        if journey is not None:
            journey.reached(index)
        goes = state.program is program and index < len(program.steps)
        y, mode = None, _pop_mode()
        try:
            if goes and program.steps[index].op == self._op and type(mode) is Interposer and mode.state is state:
                call = program.calls[index]
                y = None if call is None else call.at(state, module, args[0])
        finally:
            _push_mode(mode)
        if y is None:
            return self.plain(module, *args)
        state.calls, state.seen = index + 1, state.seen + 1
        if journey is not None:
            journey.ran(index, y)
        if index in program.held_outputs:
            hold_output(state, program.steps[index], y)
        return y


class Area(_Site):
    """A module whose own code makes covered calls, or others that save what is to be caught.

    ``calls``: all covered calls beneath it, in order, or, where there are none (``counts`` False), the numbers of the
    covered calls that come next after what is to be caught.
    """

    def __init__(self, module: nn.Module, name: str, program: Program, calls: Iterable[int], counts: bool) -> None:
        super().__init__(module, program, calls)
        self.name, self._counts = name, counts
        self.expected *= counts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, module = _running.state, self.module
        if state is None or not _gradients() or _top(False) is not None or transformed():
            return self.plain(module, *args, **kwargs)
        if self.at < len(self._calls):
            state.calls = self._calls[self.at]
        before, _running.state = state.seen, None
        try:
            with Interposer(state):
                return self.plain(module, *args, **kwargs)
        finally:
            _running.state = state
            self.at += state.seen - before if self._counts else 1


class Reading(_Site):
    """A module without sites beneath it whose own code saves outputs of ReLUs, as a gate does that scales one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, module = _running.state, self.module
        if state is None or not _gradients() or _top(False) is not None or transformed():
            return self.plain(module, *args, **kwargs)
        if state.deferred is not None:
            state.store_deferred()
        with caught(state, pack_known):
            return self.plain(module, *args, **kwargs)


class Sites:
    """The sites of one model under one program.

    The whole forward is interposed on under a plan of the caller's (``given``), every covered call of which is checked,
    and where the model's own code makes calls that have to be seen.
    """

    def __init__(self, model: nn.Module, program: Program, given: bool) -> None:
        self.program = program
        self._sites = [] if given else _sites(model, program)
        self._whole = given or any(isinstance(s, Area) and s.name == "" for s in self._sites)
        self._expected = None if self._whole else sum(s.expected for s in self._sites)
        if self._whole:
            modules = dict(model.named_modules())
            leaves = {c.module: None for c in program.covered if _is_leaf(modules.get(c.module), c.op)}
            self._sites = [KnownLeaf(modules[name], program, ()) for name in leaves]

    @contextmanager
    def interposed(self, state: ForwardState) -> Iterator[None]:
        """The sites' modules are ours in this block, but for those that are not what they were when the model was
        captured; calls of other threads run as plain PyTorch."""
        before, _running.state = _running.state, state
        state.expected = self._expected
        sites = self._sites if _library() == _LIBRARY else []
        for site in sites:
            site.at, module = 0, site.ref()
            if type(module) is site.kind and site.kind.forward is site.plain:
                attributes = module.__dict__
                if site.guards.isdisjoint(attributes):
                    site.module, attributes["forward"] = module, site
        try:
            with interposed(state) if self._whole else nullcontext():
                yield
        finally:
            _running.state = before
            for site in sites:
                module = site.module
                if module is not None:
                    site.module, attributes = None, module.__dict__
                    if attributes.get("forward") is site:
                        del attributes["forward"]


def _sites(model: nn.Module, program: Program) -> list[_Site]:
    modules = dict(model.named_modules())
    wanted = program.interposed_calls()
    areas = {name for index, name in wanted if not _is_leaf(modules.get(name), program.steps[index].op)}
    caught = program.caught_calls()
    readings = {name for _, name, _ in caught if name} - {name for _, name, known in caught if not known}
    readings -= {a for a in readings if any(_beneath(name, a) for name in (*areas, *(n for _, n in wanted)))}
    areas |= {name for _, name, _ in caught} - readings
    if any("forward" in vars(modules[a]) for a in areas if a):
        areas = {""}  # somebody's own forward stands there
    areas = {a for a in areas if not any(a != b and _beneath(a, b) for b in areas)}
    readings = {r for r in readings if not any(_beneath(r, a) or _beneath(a, r) for a in areas)}
    readings = {r for r in readings if not any(r != b and _beneath(r, b) for b in readings)}
    beneath: dict[str, list[int]] = {a: [] for a in areas}
    leaves: dict[str, list[int]] = {name: [] for _, name in wanted if not any(_beneath(name, a) for a in areas)}
    for call in program.covered:
        index, name = call.covered, call.module
        area = next((a for a in areas if _beneath(name, a)), None)
        if area is not None:
            beneath[area].append(index)
        elif name in leaves:
            leaves[name].append(index)
    found: list[_Site] = [Leaf(modules[name], program, calls) for name, calls in leaves.items()]
    for a, calls in beneath.items():
        numbers = calls or [n for n, name, _ in caught if _beneath(name, a)]
        found.append(Area(modules[a], a, program, numbers, bool(calls)))
    return found + [Reading(modules[r], program, ()) for r in readings]


def _is_leaf(module: Any, op: str) -> bool:
    kind = type(module)
    if kind not in LEAVES or LEAVES[kind][0] != op or module._compiled_call_impl is not None:
        return False
    return OVERRIDING.isdisjoint(module.__dict__) and getattr(module, "padding_mode", "zeros") == "zeros"


def _beneath(name: str, area: str) -> bool:
    return not area or name == area or name.startswith(area + ".")
