"""Where a model is interposed on: only the modules between which something is kept in another form.

Most covered calls are made by a module that is exactly a ``nn.ReLU``, a ``nn.Conv2d`` or the like. While a compressed
forward runs, such a module's instance has a ``forward`` of ours (:class:`Leaf`) that runs the call as it ran when a
function mode saw it (:mod:`gistkit.runtime.calls.run`); outside the forward it is untouched, its class always. A call
that other code makes, as a function or a tensor method, is seen by a function mode around the forward of the innermost
module that makes it (:class:`Area`). What neither needs runs as plain PyTorch, unseen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gistkit.capture import bind
from gistkit.nn.eligible import transformed
from gistkit.runtime.calls.batch_norm import NativeBatchNorm
from gistkit.runtime.calls.interpose import Interposer
from gistkit.runtime.calls.run import run
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Program

_top = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
_gradients = torch.is_grad_enabled


class _Running(threading.local):
    """The forward whose modules call now, by thread."""

    state: ForwardState | None = None


_running = _Running()
Operands = Callable[[Any, torch.Tensor], tuple]


def _relu(m: Any, x: torch.Tensor) -> tuple:
    return x, m.inplace


def _conv2d(m: Any, x: torch.Tensor) -> tuple:
    own = m._parameters
    return x, own["weight"], own["bias"], m.stride, m.padding, m.dilation, m.groups


def _linear(m: Any, x: torch.Tensor) -> tuple:
    own = m._parameters
    return x, own["weight"], own["bias"]


def _max_pool2d(m: Any, x: torch.Tensor) -> tuple:
    found = bind("max_pool2d", F.max_pool2d, (x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode), None)
    return found or ()


def _dropout(m: Any, x: torch.Tensor) -> tuple:
    return x, m.p, m.training, m.inplace


LEAVES: dict[type, tuple[str, Operands]] = {
    nn.ReLU: ("relu", _relu),
    nn.Conv2d: ("conv2d", _conv2d),
    nn.Linear: ("linear", _linear),
    nn.MaxPool2d: ("max_pool2d", _max_pool2d),
    nn.Dropout: ("dropout", _dropout),
    nn.BatchNorm2d: ("batch_norm", _relu),
    nn.BatchNorm1d: ("batch_norm", _relu),
    nn.BatchNorm3d: ("batch_norm", _relu),
}
"""Modules whose forward is one covered call of their own attributes."""
_FORWARDS = {kind: kind.forward for kind in LEAVES}
_FUNCTIONS = F.relu, F.conv2d, F.linear, F.max_pool2d, F.dropout, F.batch_norm


class _Site:
    """A module of the model whose forward is ours while the model's runs."""

    def __init__(self, module: nn.Module, program: Program, calls: Iterable[int]) -> None:
        self.module, self.at = module, 0
        self._program, self._calls = program, tuple(calls)
        self._plain: Any = type(module).forward.__get__(module)

    def install(self) -> None:
        """Take the module's forward over, unless somebody else has."""
        self.at = 0
        vars(self.module).setdefault("forward", self)

    def remove(self) -> None:
        """Give it back."""
        own = vars(self.module)
        if own.get("forward") is self:
            del own["forward"]

    @property
    def expected(self) -> int:
        """How many covered calls it makes in a forward."""
        return len(self._calls)

    def __deepcopy__(self, memo: dict) -> Any:
        return type(self.module).forward.__get__(memo.get(id(self.module), self.module))


class Leaf(_Site):
    """A module whose forward is one covered call; it may run several times in a forward."""

    def __init__(self, module: nn.Module, program: Program, calls: Iterable[int]) -> None:
        super().__init__(module, program, calls)
        self._op, self._operands = LEAVES[type(module)]
        self._is_norm = self._op == "batch_norm"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, at = _running.state, self.at
        if state is None or kwargs or len(args) != 1 or not _gradients() or _top(False) is not None or transformed():
            return self._plain(*args, **kwargs)
        self.at = at + 1
        state.seen += 1
        if at >= len(self._calls) or type(args[0]) is not torch.Tensor:
            return self._plain(*args)
        index = self._calls[at]
        state.calls = index + 1
        if self._is_norm:
            return self._norm(state, index, args[0])
        values = self._operands(self.module, args[0])
        return run(state, self._program, index, self._op, values, partial(self._plain, *args))

    def _norm(self, state: ForwardState, index: int, x: torch.Tensor) -> Any:
        module: Any = self.module
        y, call = self._plain(x), self._program.calls[index]
        if type(call) is NativeBatchNorm and module.training and hasattr(y.grad_fn, "_raw_saved_input"):
            call.replace(state, y, x, module.weight, module.bias)
        return y


class Area(_Site):
    """A module whose own code makes covered calls, or others that save what is to be caught.

    ``calls``: all covered calls beneath it, in order, or, where there are none, the numbers of the covered calls that
    come next after what is to be caught.
    """

    def __init__(self, module: nn.Module, name: str, program: Program, calls: Iterable[int], counts: bool) -> None:
        super().__init__(module, program, calls)
        self.name, self._counts = name, counts

    @property
    def expected(self) -> int:
        """How many covered calls it makes in a forward."""
        return len(self._calls) if self._counts else 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = _running.state
        if state is None or not _gradients() or _top(False) is not None or transformed():
            return self._plain(*args, **kwargs)
        if self.at < len(self._calls):
            state.calls = self._calls[self.at]
        before, _running.state = state.seen, None
        try:
            with Interposer(state):
                return self._plain(*args, **kwargs)
        finally:
            _running.state = state
            self.at += state.seen - before if self._counts else 1


class Sites:
    """The sites of one model under one program."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        self.program = program
        self._sites = _sites(model, program)

    @property
    def whole(self) -> bool:
        """Whether the model's own code makes calls that have to be seen: then its whole forward is interposed on."""
        return any(isinstance(s, Area) and s.name == "" for s in self._sites)

    @property
    def expected(self) -> int:
        """How many covered calls the sites see in a forward that goes as captured."""
        return sum(s.expected for s in self._sites)

    @contextmanager
    def interposed(self, state: ForwardState) -> Iterator[None]:
        """The sites' modules are ours in this block; calls of other threads run as plain PyTorch."""
        before, _running.state = _running.state, state
        for site in self._sites:
            site.install()
        try:
            yield
        finally:
            _running.state = before
            for site in self._sites:
                site.remove()


def _sites(model: nn.Module, program: Program) -> list[_Site]:
    modules = dict(model.named_modules())
    wanted = program.interposed_calls()
    areas = {name for index, name in wanted if not _is_leaf(modules.get(name), program.op(index))}
    areas |= {name for _, name in program.caught_calls()}
    if any("forward" in vars(modules[a]) for a in areas if a):
        areas = {""}  # somebody's own forward stands there
    areas = {a for a in areas if not any(a != b and _beneath(a, b) for b in areas)}
    beneath: dict[str, list[int]] = {a: [] for a in areas}
    leaves: dict[str, list[int]] = {name: [] for _, name in wanted if not any(_beneath(name, a) for a in areas)}
    for index, name in program.modules():
        area = next((a for a in areas if _beneath(name, a)), None)
        if area is not None:
            beneath[area].append(index)
        elif name in leaves:
            leaves[name].append(index)
    found: list[_Site] = [Leaf(modules[name], program, calls) for name, calls in leaves.items()]
    for a, calls in beneath.items():
        numbers = calls or [n for n, name in program.caught_calls() if _beneath(name, a)]
        found.append(Area(modules[a], a, program, numbers, bool(calls)))
    return found


def _is_leaf(module: nn.Module | None, op: str) -> bool:
    kind = type(module)
    if kind not in LEAVES or LEAVES[kind][0] != op or "forward" in vars(module):
        return False
    if kind is nn.Conv2d and (module.padding_mode != "zeros" or isinstance(module.padding, str)):  # type: ignore[union-attr]
        return False
    if kind.forward is not _FORWARDS[kind] or module._compiled_call_impl is not None:  # type: ignore[union-attr]
        return False
    return (F.relu, F.conv2d, F.linear, F.max_pool2d, F.dropout, F.batch_norm) == _FUNCTIONS


def _beneath(name: str, area: str) -> bool:
    return not area or name == area or name.startswith(area + ".")
