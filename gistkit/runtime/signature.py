"""What tells the forwards apart that have a plan each, and what is in force around one."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from gistkit.capture import hooks_are_active

AUTOCAST_DEVICES = ("cpu", "cuda")
AutocastState = tuple[tuple[bool, torch.dtype], ...]
_OFF = (False, torch.get_autocast_dtype("cpu")), (False, torch.get_autocast_dtype("cuda"))


def autocast_now() -> AutocastState:
    """By device type whether autocast is on, and its dtype: that which was set at import where it is off everywhere."""
    return autocast_states() if torch._C._is_any_autocast_enabled() else _OFF


def autocast_states() -> AutocastState:
    """The same with the dtypes that are set."""
    on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return (on("cpu"), dtype("cpu")), (on("cuda"), dtype("cuda"))  # of AUTOCAST_DEVICES


def signature(args: tuple, kwargs: dict, by_value: tuple = (int, str)) -> tuple:
    """What a plan depends on besides the model: everything about the arguments but sizes, and autocast. Arguments of
    the types ``by_value`` count with their values, as flags do; other numbers with their type. A forward that takes
    another way because of one leaves its plan and stays exact."""
    if kwargs or any([type(x) is not torch.Tensor for x in args]):
        leaves, spec = tree_flatten((args, kwargs))
        form = str(spec)
    else:
        leaves, form = args, ""
    described = tuple([_describe(leaf, by_value) for leaf in leaves])
    autocast = tuple([(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)])
    return described, form, autocast


def foreign_context() -> str:
    """What is in force here that leaves no room for a forward's own hooks; empty where nothing is."""
    if torch._C._are_functorch_transforms_active():
        return "a function transform (torch.func) was active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation was active"
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "saved-tensor hooks were disabled"
    return "other saved-tensor hooks were active" if hooks_are_active() else ""


def modules_in(model: torch.nn.Module) -> list[torch.nn.Module]:
    """``model.modules()``, in another order, by a tenth of its calls."""
    found, seen = [model], {model}
    for module in found:
        for child in module._modules.values() if module._modules else ():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def state_kinds(model: torch.nn.Module) -> tuple:
    """Every module's class, mode and code (a changed graph has the class that it had), dtype, shape and gradient of
    every parameter and buffer: what a plan of the caller's is for."""
    found: list[Any] = []
    for module in modules_in(model):
        kind: Any = type(module)
        try:
            code = kind.forward.__code__
        except AttributeError:
            code = None
        found += kind, module.training, code
        for table in (module._parameters, module._buffers):
            for t in table.values() if table else ():
                if t is not None:
                    shape = t.shape if type(t) in (torch.nn.Parameter, torch.Tensor) or not is_lazy(t) else None
                    found += t.dtype, shape, t.requires_grad
    return tuple(found)


def _describe(leaf: Any, by_value: tuple) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, type(None), *by_value)) else type(leaf)
