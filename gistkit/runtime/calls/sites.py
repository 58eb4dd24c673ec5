"""Where a model is interposed on: only the modules between which something is kept in another form.

Most covered calls are made by a module that is exactly a ``nn.ReLU``, a ``nn.Conv2d`` or the like
(:mod:`gistkit.runtime.calls.leaves`); outside a compressed forward such a module is untouched, its class always. A call
that other code makes, as a function or a tensor method, is seen by a function mode around the forward of the innermost
module that makes it (:class:`Area`). What neither needs runs as plain PyTorch, unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from gistkit.nn.eligible import transformed
from gistkit.runtime.calls.hooks import caught, hold_saved, pack_known, top_hooks
from gistkit.runtime.calls.interpose import Interposer, interposed
from gistkit.runtime.calls.leaves import LEAVES, LIBRARY, OVERRIDING, KnownLeaf, Leaf, Site, library, running
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Program

_gradients = torch.is_grad_enabled


class Area(Site):
    """A module whose own code makes covered calls, or others that save what is to be caught.

    ``calls``: all covered calls beneath it, in order, or, where there are none (``counts`` False), the numbers of the
    covered calls that come next after what is to be caught.
    """

    def __init__(self, module: nn.Module, name: str, program: Program, calls: Iterable[int], counts: bool) -> None:
        super().__init__(module, program, calls)
        self.name, self._counts = name, counts
        self.expected *= counts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, module = running.state, self.module
        if state is None or not _gradients() or top_hooks(False) is not None or transformed():
            return self.plain(module, *args, **kwargs)
        if self.at < len(self._calls):
            state.calls = self._calls[self.at]
        before, running.state = state.seen, None
        try:
            with Interposer(state):
                return self.plain(module, *args, **kwargs)
        finally:
            running.state = state
            self.at += state.seen - before if self._counts else 1


class Reading(Site):
    """A module without sites beneath it whose own code saves outputs of ReLUs, as a gate does that scales one. Where
    the node of its result saves them all they are replaced there; else all that the module saves passes a hook."""

    def __init__(self, module: nn.Module, name: str, program: Program) -> None:
        super().__init__(module, program, ())
        self._node, self._fields = _last_node(program, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, module = running.state, self.module
        if state is None or not _gradients() or top_hooks(False) is not None or transformed():
            return self.plain(module, *args, **kwargs)
        if state.deferred is not None:
            state.store_deferred()
        if not self._node:
            with caught(state, pack_known):
                return self.plain(module, *args, **kwargs)
        y = self.plain(module, *args, **kwargs)
        node = getattr(y, "grad_fn", None)
        if type(node).__name__ == self._node:
            for field in self._fields:
                hold_saved(state, node, field)
        else:
            self._node = ""  # it goes another way than when it was captured: kept as it is now, caught from now on
        return y


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
            self._sites = [KnownLeaf(modules[name], program) for name in leaves]

    @contextmanager
    def interposed(self, state: ForwardState) -> Iterator[None]:
        """The sites' modules are ours in this block, but for those that are not what they were when the model was
        captured; calls of other threads run as plain PyTorch."""
        before, running.state = running.state, state
        state.expected = self._expected
        for site in self._sites if library() == LIBRARY else ():
            module, kind = site.ref(), site.kind
            if type(module) is kind and kind.forward is site.plain:
                attributes = module.__dict__
                if site.guards.isdisjoint(attributes):
                    site.at, site.module, attributes["forward"] = 0, module, site
        try:
            with interposed(state) if self._whole else nullcontext():
                yield
        finally:
            running.state = before
            for site in self._sites:
                module, site.module = site.module, None
                if module is not None and "forward" in module.__dict__ and module.__dict__["forward"] is site:
                    del module.__dict__["forward"]


def _sites(model: nn.Module, program: Program) -> list[Site]:
    modules = dict(model.named_modules())
    wanted = program.interposed_calls.items()
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
    found: list[Site] = [Leaf(modules[name], program, calls) for name, calls in leaves.items()]
    for a, calls in beneath.items():
        numbers = calls or [n for n, name, _ in caught if _beneath(name, a)]
        found.append(Area(modules[a], a, program, numbers, bool(calls)))
    return found + [Reading(modules[r], r, program) for r in readings]


def _last_node(program: Program, name: str) -> tuple[str, tuple[str, ...]]:
    """The node of a module's last call, and the fields in which it saves what is to be caught; ("", ()) where another
    call of the module saves some of that."""
    calls = [c for c in program.graph.calls if _beneath(c.module, name)]
    found = [(c, s) for c in calls for s in c.saves if program.catches(s.storage)]
    nodes = {s.node for _, s in found}
    if len(nodes) != 1 or any(c is not calls[-1] or s.field == "?" for c, s in found):
        return "", ()
    return nodes.pop(), tuple(s.field for _, s in found)


def _is_leaf(module: Any, op: str) -> bool:
    kind = type(module)
    if kind not in LEAVES or LEAVES[kind][0] != op or module._compiled_call_impl is not None:
        return False
    return OVERRIDING.isdisjoint(module.__dict__) and getattr(module, "padding_mode", "zeros") == "zeros"


def _beneath(name: str, area: str) -> bool:
    return not area or name == area or name.startswith(area + ".")
