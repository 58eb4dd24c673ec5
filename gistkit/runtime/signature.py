"""What tells the forwards apart that have a plan each."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from gistkit.runtime.calls.fast_modules import PLAIN


def signature(model: torch.nn.Module, args: tuple, kwargs: dict, by_value: tuple = (int, str)) -> tuple:
    """What a plan depends on besides the model's code: everything but sizes. The code of fx graphs is in it, as it may
    be made anew from one forward to the next.

    Arguments of the types ``by_value`` count with their values, as flags do; other numbers with their type. A forward
    that takes another way because of one leaves its plan and stays exact.
    """
    if kwargs or any(type(x) is not torch.Tensor for x in args):
        leaves, spec = tree_flatten((args, kwargs))
        form = str(spec)
    else:
        leaves, form = args, ""
    described = tuple([_describe(leaf, by_value) for leaf in leaves])
    autocast = tuple([(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)])
    modules = _modules(model)
    return described, form, _trainable(modules), _graph_codes(modules), autocast


def state_kinds(model: torch.nn.Module) -> tuple:
    """Every module's class and mode, dtype, shape and need of a gradient of every parameter and buffer: what a plan of
    the caller's is for."""
    found: list[tuple] = []
    for module in _modules(model):
        kind = type(module)  # while another thread's forward runs, perhaps the subclass that it gave the module
        found.append((PLAIN.get(kind, kind), module.training))
        for table in (module._parameters, module._buffers):
            found += [
                (t.dtype, None if is_lazy(t) else t.shape, t.requires_grad) for t in table.values() if t is not None
            ]
    return tuple(found)


def _trainable(modules: list[torch.nn.Module]) -> tuple[bool, ...]:
    """Which parameters need gradients, a module at a time; ``Module.parameters()`` takes ten times as long, as it
    builds their names."""
    return tuple([p.requires_grad for m in modules for p in m._parameters.values() if p is not None])


def _graph_codes(modules: list[torch.nn.Module]) -> tuple:
    """The code of every GraphModule. Classes are asked first whether there is one, as 50 layers are of a few."""
    if not any([issubclass(kind, GraphModule) for kind in set(map(type, modules))]):
        return ()
    return tuple([_code(module) for module in modules if isinstance(module, GraphModule)])


def _code(graph: GraphModule) -> tuple:
    """What a GraphModule's forward does: its code and what that calls by name. Code that is made anew of the same
    graph, as at every pickling, is equal; two functions of one name have the same code."""
    text = graph.code  # asked first: a lazy graph is compiled here
    forward: Any = type(graph).forward
    names = forward.__globals__
    called = [names[name] for name in forward.__code__.co_names if name in names]
    return text, forward.__code__, tuple([value if type(value).__hash__ else id(value) for value in called])


def _modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Every module once."""
    found, seen, pending = [], {model}, [model]
    while pending:
        module = pending.pop()
        found.append(module)
        children = module._modules
        if children:
            for child in children.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    pending.append(child)
    return found


def _describe(leaf: Any, by_value: tuple) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, type(None), *by_value)) else type(leaf)


__all__ = ["signature", "state_kinds"]
