"""Deep copies of models to run in their place, also of fx graphs: ``GraphModule.__deepcopy__`` builds a new module of
what its graph names, so that other attributes, unused parameters and a replaced forward are lost."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.fx import GraphModule

_SHARED = ("_graph", "meta")
"""Of a GraphModule's attributes those that its forward does not read: they are notes, and may hold anything."""


def deep_copy(model: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """``copy.deepcopy(model, memo)`` whose GraphModules have all that theirs have. Those share their class, which has
    the code, so they are to be run and not recompiled."""
    memo = {} if memo is None else memo
    graphs = [part for part in model.modules() if isinstance(part, GraphModule)]
    for part in graphs:
        memo[id(part)] = object.__new__(type(part))
    for part in graphs:
        own = {name: value if name in _SHARED else copy.deepcopy(value, memo) for name, value in vars(part).items()}
        memo[id(part)].__dict__.update(own)
    return copy.deepcopy(model, memo)
