"""Deep copies of models to run in their place, also where a module's own deep copy is not one.

``GraphModule.__deepcopy__`` builds a new module of what its graph names, in the graph's order: other attributes, unused
parameters and a replaced forward are lost, and parameters may change places. ``ScriptModule.__deepcopy__`` returns
parameters that are results of a ``clone``, whose gradients go to the model's own, and knows no memo: what two parts
share, each copy has for itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from gistkit.capture.isolation.unsupported_models import scripted_parts

_SHARED = ("_graph", "meta")
"""Of a GraphModule's attributes those that its forward does not read: they are notes, and may hold anything."""


def deep_copy(model: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """``copy.deepcopy(model, memo)`` whose GraphModules have all that theirs have, and whose scripted parts have leaves
    for parameters and share those that theirs share, with one another and with parts in Python. Copied GraphModules
    share their class, which has the code, so they are to be run and not recompiled.
    """
    memo = {} if memo is None else memo
    for _, part in scripted_parts(model):
        if id(part) not in memo:
            memo[id(part)] = _scripted(part, memo)
    graphs = [part for part in _python_parts(model) if isinstance(part, GraphModule)]
    for part in graphs:
        memo[id(part)] = object.__new__(type(part))
    for part in graphs:
        own = {name: value if name in _SHARED else copy.deepcopy(value, memo) for name, value in vars(part).items()}
        memo[id(part)].__dict__.update(own)
    return copy.deepcopy(model, memo)


def _python_parts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The parts of a model that are not TorchScript's, from the model inwards."""
    if not isinstance(model, torch.jit.ScriptModule):
        yield model
        for child in model.children():
            yield from _python_parts(child)


def _scripted(part: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """The part's own copy, given copies of parameters and buffers that are made under the memo. Where those are fake,
    its own are too: a capture takes no memory."""
    modes = (known.fake_mode for known in memo.values() if isinstance(known, FakeTensor))
    with torch.no_grad(), next(modes, contextlib.nullcontext()):
        twin = copy.deepcopy(part)
    pairs = zip(part.named_modules(remove_duplicate=False), twin.named_modules(remove_duplicate=False), strict=True)
    for (_, own), (_, copied) in pairs:
        for table in (own._parameters, own._buffers):
            for name, t in table.items():
                setattr(copied, name, copy.deepcopy(t, memo))
    return twin


__all__ = ["deep_copy"]
