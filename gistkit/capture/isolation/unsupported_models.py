"""Models and parts whose forward is not run by Python: those of TorchScript and of torch.compile.

No function mode sees what they call, and what they keep for backward is settled as they run: TorchScript's executor
makes other operators from the second run on, by what it saw in the first; a compiler's graph keeps what it likes.
"""

from __future__ import annotations

import sys

import torch

_COMPILER = "torch._dynamo.eval_frame"


def kind_of(module: torch.nn.Module) -> str:
    """What made the module's forward (``traced``, ``scripted``, ``compiled``); empty where Python runs it."""
    if isinstance(module, torch.jit.ScriptModule):
        return "traced" if isinstance(module, torch.jit.TopLevelTracedModule) else "scripted"
    compiler = sys.modules.get(_COMPILER)  # not imported where nothing is compiled: it takes seconds
    return "compiled" if compiler is not None and isinstance(module, compiler.OptimizedModule) else ""


def check_runs_in_python(caller: str, model: torch.nn.Module) -> None:
    """Raise TypeError, in the name of ``caller``, for a model of which no part is run by Python."""
    kind = kind_of(model)
    if not kind:
        return
    owner, own = "TorchScript's", f"the module that it was {kind} from"
    if kind == "compiled":
        owner, own = "torch.compile's", f"{own}, model._orig_mod"
    raise TypeError(
        f"{caller}: model must run in Python, got a {kind} module, whose forward is {owner}; {caller} {own}"
    )


def scripted_parts(model: torch.nn.Module, name: str = "") -> list[tuple[str, torch.nn.Module]]:
    """The outermost parts of a model that are TorchScript's, with their names."""
    if isinstance(model, torch.jit.ScriptModule):
        return [(name, model)]
    children = model.named_children()
    return [found for own, child in children for found in scripted_parts(child, f"{name}.{own}" if name else own)]


def compiled_part(model: torch.nn.Module) -> str:
    """The name of a part that torch.compile runs, by ``torch.compile(part)`` or ``part.compile()``; empty for none. The
    model itself, compiled in place, is none: compressed, it runs eagerly."""
    for name, part in model.named_modules():
        if name and (kind_of(part) == "compiled" or getattr(part, "_compiled_call_impl", None) is not None):
            return name
    return ""


def python_instead(names: tuple[str, ...]) -> str:
    """What to do about parts that TorchScript runs."""
    which = ", ".join(map(repr, names))
    return f"take the module that {which} was scripted or traced from in its place"


__all__ = ["check_runs_in_python", "compiled_part", "kind_of", "python_instead", "scripted_parts"]
