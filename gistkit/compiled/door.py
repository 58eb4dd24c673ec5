"""The entrances: ``gistkit.compile``, the backend ``gistkit`` of ``torch.compile``, and ``torch.compile`` of a model
that ``gistkit.compress`` has compressed. While Dynamo traces a compressed forward it calls :func:`note`, which
remembers the settings for the graph that is being traced and makes :class:`~gistkit.compiled.custom.ForTraced`
Inductor's partitioner. Other graphs that cuts as PyTorch does."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from gistkit.compiled import compat, record
from gistkit.compiled.partitioner import Settings, sources
from gistkit.errors import CompileError, quoted
from gistkit.formats import VALUE_FORMS
from gistkit.ir import GraphRecord, Plan
from gistkit.planning.cost import check_budget
from gistkit.planning.forms import FIDELITIES
from gistkit.runtime import WHEN_TRACED, CompressedForward, compressed_forward


def settings_of(
    plan: Plan | None = None, lossy: str | None = None, fidelity: str = "bitwise", budget: int | str | None = None
) -> Settings:
    """The settings that callers' words mean. Raises TypeError and ValueError for what is none of them, CompileError for
    a plan that compiled graphs cannot follow."""
    anew = ""
    if plan is not None:
        if lossy is not None or budget is not None:
            raise ValueError(
                f"compile: lossy and budget must be left out beside a plan, which names them, got lossy={lossy!r} and "
                f"budget={budget!r}; give a plan or words"
            )
        lossy, budget, anew = _words_of(plan)
    if not isinstance(lossy, str | None):
        raise TypeError(f"compile: lossy must be None or the name of a format, got {type(lossy).__name__}; name one")
    if lossy is not None and lossy not in VALUE_FORMS:
        raise ValueError(f"compile: lossy must be None or one of {', '.join(VALUE_FORMS)} in compiled graphs, got "
                         f"{quoted(lossy)}; name one of these, or train with gistkit.compress")  # fmt: skip
    if fidelity not in FIDELITIES[:2]:
        raise ValueError(f"compile: fidelity must be one of {', '.join(FIDELITIES[:2])}, got {quoted(fidelity)}; "
                         "bitwise changes no bit of what torch.compile computes")  # fmt: skip
    check_budget(budget)
    return Settings(lossy, fidelity, budget, anew)


def _words_of(plan: Plan) -> tuple[str | None, int | None, str]:
    """A plan's format and budget, and the note of :class:`Settings` on its sparse storages."""
    if not isinstance(plan, Plan):
        raise TypeError(f"compile: plan must be a gistkit.Plan or None, got {type(plan).__name__}; use Plan.from_json")
    host, sparse = (
        ", ".join(f"storage {d.storage} ({d.codec})" for d in plan.decisions if chosen(d))
        for chosen in (lambda d: d.on_host, lambda d: d.form.sparse)
    )
    if host or plan.sub_batches > 1:
        what = f"{host} on the host" if host else f"{plan.sub_batches} sub-batches"
        raise CompileError(
            f"compile: plan must keep everything on the device, in one batch, got {what}; plan with policy='gist', or "
            "run it with gistkit.compress(model, plan)"
        )
    note = f"compiled graphs have no sparse forms; decided anew are, of the plan, {sparse}" if sparse else ""
    return plan.contract.lossy, plan.budget_bytes, note


@dataclass(frozen=True)
class Backend:
    """A backend of ``torch.compile``: Inductor, with gistkit's partitioner. ``records``: what was decided for each
    graph that it has compiled, by frame and parameters; a graph that is compiled again, for other sizes, replaces the
    one before. ``model``: what it compiles, as :func:`_likeness` tells it. Two of the same settings are equal, so that
    Dynamo shares the graphs of equal blocks that are compiled one by one, and does not give up at recompile_limit."""

    settings: Settings
    model: tuple = field(default=(), compare=False, repr=False)
    records: Records = field(default_factory=dict, compare=False, repr=False)

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict | None = None
    ) -> Callable:
        given = options or {}
        if given.get("custom_partitioner_fn") is not None:
            raise ValueError(
                "compile: options must not name a custom_partitioner_fn, which gistkit sets itself; leave it out, or "
                "compile with torch.compile alone"
            )
        from gistkit.compiled.custom import options as options_of  # imports Inductor

        key = _key(graph, inputs, self.settings, (mode, sorted(given.items(), key=str)))
        with record.collected() as found:
            inductor = compat.part("_TorchCompileInductorWrapper")(mode, options_of(self.settings, **given), None)
            compiled = inductor(graph, inputs)
        if found:
            record.remember(key, found)
        elif torch.is_grad_enabled():
            found = record.recalled(key)
        parameters = compat.real_parameters(inputs)
        if found:
            place = (*compat.frame(), *map(id, parameters))
            self.records[place] = found
            for parameter in parameters:
                _BY_PARAMETER.setdefault(parameter, {})[place] = found
        return compiled

    def reset(self) -> None:
        """What ``torch.compiler.reset`` calls."""
        self.records.clear()


Records = dict[tuple, list[GraphRecord]]
_BY_PARAMETER: Any = WeakIdKeyDictionary()
_BY_MODEL: weakref.WeakKeyDictionary[Any, Backend] = weakref.WeakKeyDictionary()


def _likeness(model: Callable) -> tuple:
    """What models have in common that share their graphs: class, and names, shapes and types of parameters."""
    if not isinstance(model, torch.nn.Module):
        return ()
    parameters = ((n, None if is_lazy(p) else p.shape, p.dtype) for n, p in model.named_parameters())
    return type(model), *parameters


def _key(graph: fx.GraphModule, inputs: Sequence[Any], settings: Settings, words: Any) -> str:
    """A graph's name among the records in the cache."""
    shapes = [
        (tuple(map(str, x.shape)), str(x.dtype), str(x.device), x.requires_grad) if isinstance(x, torch.Tensor) else ""
        for x in inputs
    ]
    told = (torch.__version__, sources(), repr(settings), repr(words), str(graph.graph), repr(shapes))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


def backend(
    graph: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable:
    """The backend ``gistkit``: ``torch.compile(model, backend="gistkit", options={"lossy": "fp8s", ...})``.

    Of the options, ``plan``, ``lossy``, ``fidelity`` and ``budget`` are those of :func:`gistkit.compile`; all others
    are Inductor's.
    """
    given = dict(options or {})
    words = {name: given.pop(name) for name in ("plan", "lossy", "fidelity", "budget") if name in given}
    return Backend(settings_of(**words))(graph, inputs, mode=mode, options=given)


def compile(
    model: Callable,
    plan: Plan | None = None,
    *,
    lossy: str | None = None,
    fidelity: str = "bitwise",
    budget: int | str | None = None,
    **compile_kwargs: Any,
) -> Callable:
    """``torch.compile(model, **compile_kwargs)``, whose training steps keep fewer bytes between forward and backward.

    Example: ``model = gistkit.compile(model)``. With ``fidelity="bitwise"`` and without ``lossy`` the loss and all
    gradients are ``torch.equal`` to those of ``torch.compile`` with the same ``compile_kwargs`` (``mode``, ``options``,
    ``dynamic``, ``fullgraph``): tested on the CPU. On a GPU this class keeps torch.compile's kernels and
    rebuilds only what follows their arithmetic (docs/compiled.md says for which networks that was measured).
    ``fidelity="reassociated"`` rebuilds more there, and what reads it may round or sum otherwise.
    ``eval()`` and ``no_grad`` run what torch.compile runs. :func:`gistkit.report` tells what was decided.

    ``plan``: one of :func:`gistkit.plan`; its lossy format and budget apply. Its decisions are about the eager step's
    storages, so they are made anew for the compiled graphs; the report names those with sparse forms, which graphs have
    not. ``lossy``: a format for what is kept in full otherwise.
    ``budget``: bytes, ``"12GiB"`` or ``"60%"`` of the step's predicted peak under torch.compile. As few storages change
    as it takes for the predicted peak of each graph to fit. Where all are too few, and bits may differ, backward runs
    parts of forward again. If nothing fits, compilation fails with BudgetError, inside PyTorch's own error. On a GPU
    convolutions and attentions run by themselves while it compiles, for the workspace that they need, which sets
    ``torch.cuda.max_memory_allocated`` back.

    Raises TypeError and ValueError for wrong arguments; CompileError for a model that gistkit.compress has compressed,
    a plan with storages on the host or sub-batches, and a release of PyTorch without what this needs.
    """
    if not callable(model):
        raise TypeError(f"compile: model must be a module or a function, got {type(model).__name__}; pass the model")
    if "backend" in compile_kwargs:
        raise TypeError(
            f"compile: backend must be left out, got {quoted(compile_kwargs['backend'])}: gistkit compiles with "
            "Inductor; call torch.compile for another backend"
        )
    if isinstance(model, torch.nn.Module) and any(compressed_forward(part) is not None for part in model.modules()):
        raise CompileError("compile: model must not be compressed; call torch.compile(model), or gistkit.restore first")
    made = Backend(settings_of(plan, lossy, fidelity, budget), _likeness(model))
    compiled = torch.compile(model, backend=made, **compile_kwargs)
    for owner in (model, compiled):
        if isinstance(owner, torch.nn.Module):
            _BY_MODEL[owner] = made
    return compiled


def records_of(model: torch.nn.Module) -> list[GraphRecord] | None:
    """What was decided for the graphs of a model or its parts; None where none was compiled with gistkit."""
    made = [_BY_MODEL[part] for part in model.modules() if part in _BY_MODEL]
    tables = [_graphs_of(b) for b in made] if made else [_BY_PARAMETER.get(p, {}) for p in model.parameters()]
    found: Records = {place: records for source in tables for place, records in source.items()}
    return [r for records in found.values() for r in records] if made or found else None


def _graphs_of(backend: Backend) -> Records:
    """A backend's own records; where all its graphs were compiled for another model, that one's."""
    if backend.records or not backend.model:
        return backend.records
    shared = (b.records for b in _BY_MODEL.values() if b == backend and b.model == backend.model)
    return next(filter(None, shared), {})


_TRACED: weakref.WeakKeyDictionary[Any, tuple[Settings, list[CompressedForward]]] = weakref.WeakKeyDictionary()
_RECORDS: weakref.WeakKeyDictionary[Any, Records] = weakref.WeakKeyDictionary()
"""By the number of the Python frame: one that is compiled again takes the place of the first."""


def note(stand_in: CompressedForward) -> None:
    """A compressed forward is being traced. Raises CompileError where the graph has another under other settings."""
    from gistkit.compiled.custom import PASSES, ForTraced  # imports Inductor

    context, asked = compat.part("TracingContext").try_get(), stand_in.engine.settings
    if context is None:
        return
    settings = Settings(asked.lossy, asked.fidelity)
    known, owners = _TRACED.setdefault(context, (settings, []))
    if known != settings:
        raise CompileError(
            f"compile: compressed models in one graph must have the same settings, got {known} and {settings}; "
            "compress the module around them instead"
        )
    if stand_in not in owners:
        owners.append(stand_in)
    _RECORDS.setdefault(stand_in, {})
    compat.set_partitioner(ForTraced(), PASSES)


def settings_in_force() -> Settings | None:
    """The settings of the graph that is being compiled; None where it has no compressed forward."""
    context = compat.part("TracingContext").try_get()
    return _TRACED[context][0] if context in _TRACED else None


def remember_traced(records: list[GraphRecord]) -> None:
    """What was decided for the graph that is being compiled, for the reports of its models."""
    for stand_in in _TRACED[compat.part("TracingContext").try_get()][1]:
        _RECORDS[stand_in][compat.frame()] = records


def records_of_traced(stand_in: CompressedForward) -> list[GraphRecord] | None:
    """What was decided for a compressed model's graphs, none for those from caches; None where no graph was traced."""
    found = _RECORDS.get(stand_in)
    return None if found is None else [r for records in found.values() for r in records]


WHEN_TRACED.append(note)
