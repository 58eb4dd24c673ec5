"""Models and parts whose forward is not run by Python: those of TorchScript and of torch.compile.

No function mode sees what they call, and what they keep for backward is settled as they run: TorchScript's executor
makes other operators from the second run on, by what it saw in the first; a compiler's graph keeps what it likes.
"""

from __future__ import annotations

import sys

import torch

from gistkit.errors import CaptureError

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


def refuse_foreign_parts(model: torch.nn.Module, *, compiled_too: bool) -> None:
    """Raise CaptureError for a part that TorchScript runs, or, with ``compiled_too``, torch.compile, by
    ``torch.compile(part)`` or ``part.compile()``. The model itself, compiled in place, runs eagerly."""
    for name, part in model.named_modules():
        kind = kind_of(part)
        if name and not kind and getattr(part, "_compiled_call_impl", None) is not None:
            kind = "compiled"
        if kind and (compiled_too or kind != "compiled"):
            raise CaptureError(
                f"the module {name!r} is {kind}, and no capture tells what it keeps for backward; put the module that "
                "it was made from in its place, or leave the plan out: gistkit.compress(model) takes it as it is"
            )
