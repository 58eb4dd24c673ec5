"""What cannot be captured, and why: what was running, what it raised, and what to do about it.

Models and parts whose forward is not run by Python are refused. No function mode sees what they call, and what they
keep for backward is settled as they run: TorchScript's executor makes other operators from the second run on, by what
it saw in the first; a compiler's graph keeps what it likes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.parameter import is_lazy

from gistkit.capture.isolation import stand_in_of
from gistkit.errors import CaptureError

_WITHOUT = "leave the plan out: gistkit.compress(model) records a real step"


def _kind_of(module: torch.nn.Module) -> str:
    """What made the module's forward (``traced``, ``scripted``, ``compiled``); empty where Python runs it."""
    if isinstance(module, torch.jit.ScriptModule):
        return "traced" if isinstance(module, torch.jit.TopLevelTracedModule) else "scripted"
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # importing it where nothing is compiled takes seconds
    return "compiled" if compiler is not None and isinstance(module, compiler.OptimizedModule) else ""


def check_runs_in_python(caller: str, model: torch.nn.Module) -> None:
    """Raise TypeError, in the name of ``caller``, for what is no module, or one that Python does not run."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself"
        )
    kind = _kind_of(model)
    if kind:
        owner, where = ("torch.compile's", ", model._orig_mod") if kind == "compiled" else ("TorchScript's", "")
        raise TypeError(
            f"{caller}: model must run in Python, got a {kind} module, whose forward is {owner}; {caller} the module "
            f"that it was {kind} from{where}"
        )


def check_parts(model: torch.nn.Module, *, compiled_too: bool) -> None:
    """Raise CaptureError for a part that no copy can stand for: one that TorchScript runs or, with ``compiled_too``,
    torch.compile (the model itself, compiled in place, runs eagerly), a lazy module, one with hooks or a replaced
    forward: these are functions, which a deep copy shares, so that they would act on the user's objects."""
    for name, part in model.named_modules():
        kind, stand_in = _kind_of(part), stand_in_of(part)
        if name and not kind and getattr(part, "_compiled_call_impl", None) is not None:
            kind = "compiled"
        if kind and (compiled_too or kind != "compiled"):
            raise CaptureError(
                f"the module {name!r} is {kind}, and no capture tells what it keeps for backward; put the module that "
                "it was made from in its place, or leave the plan out: gistkit.compress(model) takes it as it is"
            )
        forward = part.__dict__.get("forward") if stand_in is None else stand_in.previous
        what = None
        if any(t is not None and is_lazy(t) for t in (*part._parameters.values(), *part._buffers.values())):
            what = f"is lazy and its parameters are not there yet; run one forward first, or {_WITHOUT}"
        elif part._forward_hooks or part._forward_pre_hooks:
            what = f"has forward hooks, whose effects a copy cannot isolate; take them off, or {_WITHOUT}"
        elif isinstance(forward, types.FunctionType):
            what = "has a forward replaced by a function, whose effects a copy cannot isolate; take it off, or "
            what += _WITHOUT
        if what:
            raise CaptureError(f"the module {name or type(model).__name__!r} {what}")


def check_scripts(model: torch.nn.Module) -> None:
    """Raise CaptureError where a part's Python module has a TorchScript function: a kernel that TorchScript has fused
    for a GPU reads the memory of its operands, and fake ones have none."""
    for place in sorted({type(part).__module__ for part in model.modules()}):
        found = vars(sys.modules[place]) if place in sys.modules else {}
        for name, value in found.items():
            if isinstance(value, torch.jit.ScriptFunction):
                raise CaptureError(
                    f"{place} has the TorchScript function {name}, which cannot run on fake tensors of a GPU; record a "
                    "real step (capture: fake=False)"
                )


@contextmanager
def running(part: str, model: torch.nn.Module) -> Iterator[None]:
    """Turn an exception of a part (``forward``, ``loss_fn``, ``backward``) into a CaptureError that names it."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        name = type(model).__name__
        what = f"the {part} of {name} could not be captured on a copy of it"
        if part == "loss_fn":
            what = f"loss_fn could not be captured on fake tensors, as a copy of {name} returned them"
        raise CaptureError(f"{what}: {type(error).__name__}: {error}; {_remedy(part, model, error)}") from error


def _remedy(part: str, model: torch.nn.Module, error: Exception) -> str:
    if isinstance(error, DataDependentOutputException):
        compare = (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)
        compares = any(isinstance(module, compare) for module in model.modules())
        given = "pass is_causal or tgt_is_causal, without which torch.nn's transformers look at masks, or " * compares
        return (
            f"the {part} asks a tensor for its values (item(), float(), if), and here there are none: {given}take that "
            f"out of it, or {_WITHOUT}"
        )
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the {part} makes a tensor whose size hangs on values (indexing by a bool tensor, nonzero(), unique()), "
            f"and here there are none: use torch.where, or the mask as a factor, or {_WITHOUT}"
        )
    if isinstance(error, NotImplementedError) and "Sparse" in str(error):
        modules = model.named_modules()
        sparse = [repr(name or type(m).__name__) for name, m in modules if getattr(m, "sparse", False) is True]
        remedy = f"make {', '.join(sparse)} with sparse=False" if sparse else "give dense tensors"
        return f"a sparse tensor has no storage whose bytes could be planned: {remedy}, or {_WITHOUT}"
    if part == "loss_fn":
        return "it is called as loss_fn(output, *targets), a plan's as loss_fn(model(batch[0]), *batch[1:])"
    return f"mend it where the model alone raises it too, or {_WITHOUT}"
