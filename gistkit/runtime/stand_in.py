"""The callable that stands in a compressed model's ``forward``: how it is found, copied, pickled and taken off."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch.fx import GraphModule

from gistkit.capture import STAND_IN
from gistkit.errors import CompressError
from gistkit.formats import AUTO
from gistkit.ir import Plan
from gistkit.runtime.engine import Engine
from gistkit.runtime.program.program import Settings

WHEN_TRACED: list[Callable[[CompressedForward], None]] = []
"""What to call when ``torch.compile`` traces a compressed model: the compiled path's, once it is imported."""
_NUMBERS = itertools.count()
_STAND_INS: weakref.WeakValueDictionary[str, CompressedForward] = weakref.WeakValueDictionary()
_is_compiling = torch.compiler.is_compiling


class CompressedForward:
    """Stands in the model's ``forward``; copies and pickles with it (with a fresh engine of the same settings).

    It has the face of the bound method that it stands for, and stands under :data:`STAND_IN` too, where it is found
    after somebody has wrapped ``forward``. ``previous``: what stood in ``model.__dict__["forward"]`` before, which a
    captured copy runs; ``active``: False where :func:`restore` had to leave it inside a wrapper."""

    # ``functools.wraps`` copies what is in ``__dict__`` into wrappers, which would then hold the model and the engine.
    __slots__ = (
        *("__dict__", "__func__", "__weakref__", "_run", "active", "engine", "model", "number", "plain", "previous"),
        "traceable",
    )

    def __init__(self, model: torch.nn.Module, settings: Settings, plan: Plan | None, previous: Any = None) -> None:
        self.model = model
        self.engine = Engine(settings, plan)
        self.previous, self.active = previous, True
        # As text: a number that differs from model to model Dynamo makes symbolic, and no constant any more.
        self.number, self.plain = str(next(_NUMBERS)), self.__wrapped__
        # A plan is about the eager step's storages, and "auto" measures eager steps: both run eagerly.
        self.traceable = plan is None and settings.lossy != AUTO
        _STAND_INS[self.number] = self
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(self.__wrapped__, name):
                setattr(self, name, getattr(self.__wrapped__, name))
        self.__func__ = _unbound(self.__wrapped__)
        # A compiler that traced the runtime's own code would follow its hooks and modes without end.
        self._run = torch.compiler.disable(_run_eagerly, reason="gistkit.compress runs this model's forward eagerly")

    @property
    def __wrapped__(self) -> Any:
        return self.previous or type(self.model).forward.__get__(self.model)

    @property
    def __self__(self) -> torch.nn.Module:
        return self.model

    @property
    def __code__(self) -> Any:
        """What torch.compile asks for where the model is a GraphModule."""
        return type(self.model).forward.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.__wrapped__(*args, **kwargs)
        if self.traceable and _is_compiling():
            _announce(self.number)
            return self.plain(*args, **kwargs)
        return self._run(self.engine, self.model, self.previous, args, kwargs)  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict) -> CompressedForward:
        model = copy.deepcopy(self.model, memo)
        previous = copy.deepcopy(self.previous, memo)
        twin = CompressedForward(model, self.engine.settings, self.engine.plan, previous)
        twin.active = self.active
        twin.__func__ = self.__func__  # a copied wrapper has this one, and finds the copy's stand-in by it
        return twin

    def __reduce__(self) -> tuple:
        if self.in_force and not self._is_outermost:
            raise pickle.PicklingError(
                f"pickle: {name_of(vars(self.model)['forward'])} stands around the forward of a compressed model and "
                "would be lost; undo that first (accelerate: unwrap_model(model, keep_fp32_wrapper=False)), or pickle "
                "model.state_dict()"
            )
        made_of = (self.model, self.engine.settings, self.engine.plan, self.previous)
        return CompressedForward, made_of, (None, {"active": self.active})

    @property
    def is_reached(self) -> bool:
        """Whether what stands in the model's forward is this, or says that it wraps it."""
        found = vars(self.model).get("forward")
        while found is not None and found is not self and found is not self.__func__:
            partial = found.func if isinstance(found, functools.partial) else None
            found = getattr(found, "__wrapped__", None) or getattr(found, "__func__", partial)
        return found is not None

    @property
    def in_force(self) -> bool:
        """Whether the model is compressed. A function that does not say what it wraps is taken to call this."""
        found = vars(self.model).get("forward")
        if not self.active or self.is_reached:
            return self.active
        removed = found is self.previous or getattr(found, "__func__", None) is type(self.model).forward
        return not removed

    @property
    def _is_outermost(self) -> bool:
        found = vars(self.model).get("forward")
        return found is self or getattr(found, "__func__", None) is self.__func__

    def attach(self) -> None:
        """Take over the model's forward, and what copies the model without a copy of this; a GraphModule, which copies
        and pickles what its graph names alone, is not copied."""
        own = vars(self.model)
        if not self.is_reached:
            own["forward"] = self
        taken = {"_replicate_for_data_parallel": self.replicate, "__reduce_ex__": self.reduce_model}
        if isinstance(self.model, GraphModule):
            taken["__deepcopy__"] = taken["__reduce_ex__"] = functools.partial(_refuse, _GRAPH)
        own.update(taken, **{STAND_IN: self})
        self.active = True

    def detach(self) -> None:
        """Undo :meth:`attach`; inside somebody's wrapper this stays, and hands calls on."""
        own = vars(self.model)
        for name in _COPYING:
            own.pop(name, None)
        self.active, self.engine = False, Engine(self.engine.settings)
        if self.is_reached and not self._is_outermost:
            return
        del own[STAND_IN]
        if self._is_outermost:
            own.pop("forward")
            if self.previous is not None:
                own["forward"] = self.previous

    def replicate(self) -> Any:
        replica = type(self.model)._replicate_for_data_parallel(self.model)  # type: ignore[operator]
        vars(replica)["forward"] = functools.partial(_refuse, _REPLICA)
        return replica

    def reduce_model(self, protocol: SupportsIndex) -> Any:
        """The model's own ``__reduce_ex__``. A shallow copy by ``copy.copy`` gets a forward that refuses."""
        kind: Any = type(self.model)
        made, given, *rest = kind.__reduce_ex__(self.model, protocol)
        shallow = sys._getframe(1).f_code is copy.copy.__code__
        return made, given, *(self._carried(item, shallow) if isinstance(item, dict) else item for item in rest)

    def _carried(self, attributes: dict[str, Any], shallow: bool) -> dict[str, Any]:
        if not shallow:
            return attributes | {"forward": self} if self._is_outermost else attributes
        left_out = (STAND_IN, *_COPYING) if attributes.get(STAND_IN) is self else ()
        kept = {name: value for name, value in attributes.items() if name not in left_out}
        return kept | {"forward": functools.partial(_refuse, _SHALLOW)}


def _announce(number: str) -> str:
    for call in WHEN_TRACED:
        call(_STAND_INS[number])
    return number


# Dynamo calls it while it traces, and puts its result into the graph.
_announce._dynamo_marked_constant = True  # type: ignore[attr-defined]

_COPYING = ("__deepcopy__", "__reduce_ex__", "_replicate_for_data_parallel")
_REPLICA = (
    "DataParallel: a replica of a compressed model cannot run, its forward would be the original's; use "
    "torch.nn.parallel.DistributedDataParallel, one process a device, or call gistkit.restore(model) first"
)
_GRAPH = (
    "copy, pickle: a compressed fx.GraphModule copies what its graph names alone; call gistkit.restore(model) before "
    "copying and compress the copy"
)
_SHALLOW = (
    "copy.copy: a shallow copy of a compressed model cannot run, its forward would be the original's; use "
    "copy.deepcopy(model), or call gistkit.restore(model) before copying"
)


def _refuse(text: str, *args: Any, **kwargs: Any) -> Any:
    raise CompressError(text)


def _unbound(original: Callable) -> Callable:
    """A stand-in as a function of the module. accelerate wraps ``forward.__func__`` and binds the result to the model;
    as this holds no model, a copy of that runs the copy. It has no ``__wrapped__``, which accelerate would follow."""

    def forward(self: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        stand_in = vars(self).get(STAND_IN)
        return type(self).forward(self, *args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)

    functools.update_wrapper(forward, original, updated=())
    del forward.__wrapped__
    with contextlib.suppress(TypeError, ValueError):  # what has no signature, or one with a "self" of its own
        told = inspect.signature(original)
        module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = told.replace(parameters=[module, *told.parameters.values()])  # type: ignore[attr-defined]
    return forward


def name_of(function: Any) -> str:
    """A function's qualified name, or its type's."""
    return getattr(function, "__qualname__", type(function).__name__)


def _run_eagerly(engine: Engine, model: torch.nn.Module, previous: Any, args: tuple, kwargs: dict) -> Any:
    # the lookup is here because PyTorch 2.11 cannot trace it, and would say only that
    return engine.run(model, previous or type(model).forward.__get__(model), args, kwargs)


def compressed_forward(model: torch.nn.Module) -> CompressedForward | None:
    """The stand-in of a compressed model, or None."""
    found = vars(model).get(STAND_IN)
    return found if isinstance(found, CompressedForward) and found.in_force else None
