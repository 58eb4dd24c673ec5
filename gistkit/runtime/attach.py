"""compress and restore: a model's forward is replaced on the instance, and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

import torch
from torch.fx import GraphModule

from gistkit.capture import check_runs_in_python
from gistkit.errors import CompressError
from gistkit.ir import Plan
from gistkit.planning.policies import check_lossy
from gistkit.runtime.engine import Engine
from gistkit.runtime.program.match_plan import check_plan
from gistkit.runtime.program.settings import Settings

Model = TypeVar("Model", bound=torch.nn.Module)
FIDELITIES = ("bitwise", "reassociated")
SLICES = 8


class CompressedForward:
    """Stands in the model's ``forward``; copies and pickles with it (with a fresh engine of the same settings)."""

    def __init__(self, model: torch.nn.Module, settings: Settings, plan: Plan | None, previous: Any = None) -> None:
        self.model = model
        self.engine = Engine(settings, plan)
        self.previous = previous
        self.kept: dict[str, Any] = {}
        """What else the model had in place of what :meth:`attach` puts there."""
        # A compiler that traced the runtime's own code would follow its hooks and modes without end.
        self._run = torch.compiler.disable(_run_eagerly, reason="gistkit.compress runs this model's forward eagerly")

    @property
    def gistkit_original(self) -> Any:
        """What stood in ``model.__dict__["forward"]`` before: a captured copy runs that (graph.capture)."""
        return self.previous

    @property
    def __code__(self) -> Any:
        """The code of the model's own forward, which torch.compile asks for where the model is a GraphModule."""
        return type(self.model).forward.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.engine, self.model, self.previous, args, kwargs)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict) -> CompressedForward:
        model = copy.deepcopy(self.model, memo)
        previous = copy.deepcopy(self.previous, memo)
        twin = CompressedForward(model, self.engine.settings, self.engine.plan, previous)
        twin.kept = copy.deepcopy(self.kept, memo)
        return twin

    def __reduce__(self) -> tuple:
        kept = {"kept": self.kept} if self.kept else None
        return CompressedForward, (self.model, self.engine.settings, self.engine.plan, self.previous), kept

    def attach(self) -> None:
        """Take the model's forward over. A GraphModule copies and pickles what its graph names, and nothing else that
        it has: there these are taken over too."""
        own = vars(self.model)
        own["forward"] = self
        if isinstance(self.model, GraphModule):
            self.kept = {name: own[name] for name in _GRAPH_MODULES if name in own}
            own["__deepcopy__"], own["__reduce_ex__"] = self.copy_graph, self.reduce_graph

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        own = vars(self.model)
        for name in ("forward", *_GRAPH_MODULES):
            own.pop(name, None)
        own.update(self.kept)
        if self.previous is not None:
            own["forward"] = self.previous

    def copy_graph(self, memo: dict) -> Any:
        """``__deepcopy__`` of the GraphModule: its own, and the stand-in's copy where that makes a GraphModule."""
        own = self.kept.get("__deepcopy__")
        made: Any = type(self.model)
        twin = made.__deepcopy__(self.model, memo) if own is None else own(memo)
        if isinstance(twin, GraphModule) and twin is not self.model and compressed_forward(twin) is None:
            memo[id(self.model)] = twin
            copy.deepcopy(self, memo).attach()
        return twin

    def reduce_graph(self, protocol: SupportsIndex) -> Any:
        """``__reduce_ex__`` of the GraphModule: its own, whose attributes are without the stand-in."""
        own = self.kept.get("__reduce_ex__")
        reduced = type(self.model).__reduce_ex__(self.model, protocol) if own is None else own(protocol)
        if isinstance(reduced, str):  # the name of a global
            return reduced
        made, given, *rest = reduced
        given = tuple(self._without_stand_in(item) if isinstance(item, dict) else item for item in given)
        told = made, given, self.engine.settings, self.engine.plan, self.previous
        return _compressed_graph, told, *rest

    def _without_stand_in(self, attributes: dict[str, Any]) -> dict[str, Any]:
        if attributes.get("forward") is not self:
            return attributes
        return {n: value for n, value in attributes.items() if n not in ("forward", *_GRAPH_MODULES)} | self.kept


_GRAPH_MODULES = ("__deepcopy__", "__reduce_ex__")


def _compressed_graph(made: Callable, given: tuple, settings: Settings, plan: Plan | None, previous: Any) -> Any:
    model = made(*given)
    if isinstance(model, GraphModule):
        CompressedForward(model, settings, plan, previous).attach()
    return model


def _run_eagerly(engine: Engine, model: torch.nn.Module, previous: Any, args: tuple, kwargs: dict) -> Any:
    # the lookup is here because PyTorch 2.11 cannot trace it, and would say only that
    return engine.run(model, previous or type(model).forward.__get__(model), args, kwargs)


def compressed_forward(model: torch.nn.Module) -> CompressedForward | None:
    """The stand-in of a compressed model, or None."""
    found = vars(model).get("forward")
    return found if isinstance(found, CompressedForward) else None


def compress(model: Model, plan: Plan | None = None, *, lossy: str | None = None, fidelity: str = "bitwise") -> Model:
    """Make the model keep its saved tensors encoded; returns the same object.

    Without a plan the first training forward is captured and planned by the Gist policy: bit-exact by default (loss,
    gradients, buffers and parameters equal plain PyTorch's bit for bit under deterministic algorithms). ``lossy`` adds
    delayed precision reduction in a format of ``fp16``, ``fp10``, ``fp8`` (unscaled, the paper's) or those with ``s``
    (a scale per 128 elements) or ``t`` (per tensor). ``fidelity="reassociated"`` lets weight gradients be summed in
    batch slices. Under a ``plan`` of :func:`gistkit.plan` every decision is the plan's, its format and its slices too,
    and a step that is not the planned one is a :class:`PlanMismatchError`: another dataflow or other parameters and
    buffers; with a budget also other kernels or strides, frozen weights, larger inputs, more rows, another mode. What a
    plan with a budget decides is carried out or refused with a :class:`PlanError`; under one of policy ``plain``, which
    decides nothing, PyTorch's own operators run. Parameters, state-dict keys and classes stay as they are; ``eval()``
    and ``no_grad`` run untouched code, but for a plan that was made of a model in ``eval()``: it is carried out in that
    mode, wherever gradients are on.

    Raises TypeError for what is not a module or a plan, and for a scripted, traced or compiled module, ValueError for
    an unknown format or fidelity, CompressError where the model or a part of it is compressed already. Paper: Gist
    (Jain et al., ISCA 2018).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"compress: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself"
        )
    check_runs_in_python("compress", model)
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"compress: plan must be a gistkit.Plan or None, got {type(plan).__name__}; use Plan.from_json")
    if fidelity not in FIDELITIES:
        raise ValueError(
            f"compress: fidelity must be one of {', '.join(FIDELITIES)}, got {fidelity!r}; bitwise changes no bit of "
            "the result"
        )
    check_lossy(lossy)
    for name, part in model.named_modules():
        if compressed_forward(part) is not None:
            what = f"its submodule {name!r} is" if name else "it is"
            raise CompressError(f"compress: the model cannot be compressed: {what} compressed already; "
                                "call gistkit.restore on that first")  # fmt: skip
    if plan is not None:
        lossy = check_plan(plan, lossy)
    slices = SLICES if fidelity == "reassociated" else 1
    CompressedForward(model, Settings(lossy, fidelity, slices), plan, vars(model).get("forward")).attach()
    return model


def restore(model: Model) -> Model:
    """Undo :func:`compress`; returns the same object. Raises CompressError where the model is not compressed."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"restore: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself")
    stand_in = compressed_forward(model)
    if stand_in is None:
        raise CompressError("restore: the model is not compressed; call gistkit.compress(model) first")
    stand_in.detach()
    return model
