"""capture: the SavedGraph of a model's forward without running it on real data.

The forward runs on a deep copy with fake parameters, buffers and inputs (``FakeTensorMode``): no memory, no arithmetic,
and whatever the model does to itself it does to the copy. Random states are put back. What the copy cannot isolate are
globals and forward hooks of the user, so a model with hooks is refused and recorded on a real step instead.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from gistkit.capture.isolation.autocast_cache import MirroredAutocast, autocast_device
from gistkit.capture.isolation.closures import on_copy
from gistkit.capture.isolation.copies import deep_copy
from gistkit.capture.isolation.fakes import Fakes
from gistkit.capture.isolation.unsupported_models import check_runs_in_python, refuse_foreign_parts
from gistkit.capture.ledger import tensors_in
from gistkit.capture.recorder import Recorder
from gistkit.capture.refusal import running
from gistkit.capture.step.traced import traced_step
from gistkit.errors import CaptureError
from gistkit.ir import SavedGraph

STAND_IN = "_gistkit"
"""The name in ``module.__dict__`` of what stands in for a compressed module's forward. While it is ``in_force``, a
copy runs ``previous`` in its place, which was in ``__dict__["forward"]`` before (None: the class's forward)."""


def capture(
    model: torch.nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    *,
    fake: bool = True,
    backward: bool = False,
    on_cpu: bool = False,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: tuple = (),
) -> SavedGraph:
    """The calls and saved storages of ``model(*args, **kwargs)`` in its present mode.

    ``args`` and ``kwargs`` may hold real or fake tensors in any nesting. The model, its buffers, the gradients and
    every random state stay as they are. With ``fake=False`` the copy really runs, which also measures densities (and
    synchronises once). Gradients are on during the run, autocast as the caller has it.

    ``backward`` runs the whole step on fake tensors, on the CPU's operators whatever device the model is on (also
    ``meta``, so model and batch may be far larger than the machine), and fills in the graph's ``tasks`` and ``blocks``.
    Its loss is ``loss_fn(output, *targets)``, without a ``loss_fn`` the output itself, its ``loss``, or the sum of all
    that it holds. The output is held until the step ends, and arguments that need gradients get them.

    ``on_cpu`` records the forward alone with the CPU's operators too, which on another device may keep other tensors:
    the graph is that of ``backward=True`` without tasks and blocks.

    Raises :class:`CaptureError`, its cause chained, where the copy cannot be made or fake tensors cannot go (values
    that decide the control flow or a size, operators without a fake implementation, sparse tensors, user hooks on
    modules, scripted and traced parts, in a whole step compiled ones); it says whether that was in the forward, the
    ``loss_fn`` or backward. TypeError or ValueError for arguments that make no sense, a model among them that is
    scripted, traced or compiled itself.
    """
    _check(model, args, kwargs, loss_fn, targets)
    if loss_fn is not None and not backward:
        raise ValueError(
            "capture: loss_fn needs backward=True, got backward=False; without a backward there is no loss"
        )
    if backward and not fake:
        raise ValueError("capture: backward=True needs fake=True, got fake=False; a real step is recorded forward only")
    if on_cpu and not fake:
        raise ValueError("capture: on_cpu=True needs fake=True, got fake=False; a real step runs where the model is")
    # the copy of a part that is compiled in place is not: it would run other operators than the part
    refuse_foreign_parts(model, compiled_too=backward or on_cpu)
    _refuse(model)
    device_type = _elsewhere(model, (args, kwargs)) if backward or on_cpu else None
    mode = _fakes(model, device_type is None) if fake else None
    with running("forward", model):
        # casts of fake weights in the caller's autocast cache are memory to nobody; those of a real copy's would be
        cache = no_autocast_cache() if mode is None else contextlib.nullcontext()
        casts = contextlib.nullcontext() if device_type is None else MirroredAutocast(device_type)
        with untouched_random_states(), torch.enable_grad(), cache, casts:
            twin = _twin(model, mode, backward or on_cpu)
            inputs = _inputs((tuple(args), dict(kwargs or {}), tuple(targets)), mode, backward or on_cpu)
            if mode is not None and backward:
                with mode:
                    own_loss = on_copy(loss_fn, model, twin)
                    return traced_step(twin, *inputs, loss_fn=own_loss, on_cpu=device_type is None)
            return _record(twin, inputs[0], inputs[1], mode)


def _check(model: Any, args: Any, kwargs: Any, loss_fn: Any, targets: Any) -> None:
    """Raise TypeError for arguments in the place of others."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"capture: model must be a torch.nn.Module, got {type(model).__name__}; pass the module itself")
    check_runs_in_python("capture", model)
    for name, value in (("args", args), ("targets", targets)):
        if not isinstance(value, (tuple, list)):
            got, remedy = type(value).__name__, f"put it into one: {name}=(x,)"
            if isinstance(value, dict):
                remedy = "pass named ones as kwargs, behind args: (), {...}" if name == "args" else "pass its values"
            raise TypeError(f"capture: {name} must be a tuple, one item for each argument, got {got}; {remedy}")
    if kwargs is not None and not (isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs)):
        got = "a dict with other keys" if isinstance(kwargs, dict) else type(kwargs).__name__
        remedy = "positional arguments go into args: capture(model, (x, y))"
        raise TypeError(f"capture: kwargs must be a dict of the forward's arguments by name, got {got}; {remedy}")
    if loss_fn is not None and not callable(loss_fn):
        remedy = "pass a function of the model's output and the targets"
        raise TypeError(f"capture: loss_fn must be callable, got {type(loss_fn).__name__}; {remedy}")


def _elsewhere(model: torch.nn.Module, given: tuple) -> str | None:
    """The device that the model is on, in a capture with the CPU's operators; None where that is the CPU itself."""
    return autocast_device([*model.parameters(), *model.buffers(), *tensors_in(given)])


def _fakes(model: torch.nn.Module, on_cpu: bool) -> FakeTensorMode:
    """A mode of fake tensors. Its cache of what operators return gives a recurrent layer's two bias gradients, which
    are one tensor, a storage each: the second capture would have other tasks than the first. So not for those."""
    mode = Fakes(on_cpu, allow_non_fake_inputs=True)
    if any(isinstance(m, torch.nn.RNNBase) for m in model.modules()):
        mode.cache_enabled = False
    return mode


def _record(twin: torch.nn.Module, args: tuple, kwargs: dict, mode: FakeTensorMode | None) -> SavedGraph:
    recorder = Recorder(twin, source="fake" if mode is not None else "real")
    with mode or contextlib.nullcontext():
        with recorder:
            out = twin(*args, **kwargs)
        return recorder.finish(out)


def _refuse(model: torch.nn.Module) -> None:
    """Hooks and replaced forwards are functions: a deep copy shares them, and they would act on the user's objects."""
    for name, module in model.named_modules():
        stand_in = _stand_in(module)
        forward = module.__dict__.get("forward") if stand_in is None else stand_in.previous
        what = None
        if any(t is not None and is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values())):
            raise CaptureError(
                f"the module {name or type(model).__name__!r} is lazy and its parameters are not there yet; run one "
                "forward first, or leave the plan out: gistkit.compress(model) records a real step"
            )
        if module._forward_hooks or module._forward_pre_hooks:
            what = "forward hooks"
        elif isinstance(forward, types.FunctionType):
            what = "a forward replaced by a function"
        if what:
            raise CaptureError(
                f"the module {name or type(model).__name__!r} has {what}, whose effects a copy cannot isolate; take "
                "them off, or leave the plan out: gistkit.compress(model) records a real step"
            )


def _twin(model: torch.nn.Module, mode: FakeTensorMode | None, on_cpu: bool = False) -> torch.nn.Module:
    """A deep copy, its parameters and buffers fake where there is a mode; ties and aliases stay."""
    memo: dict[int, Any] = {}
    wrapped: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        stand_in = _stand_in(module)
        if stand_in is not None:
            wrapped.append((name, stand_in))
            memo[id(stand_in)] = stand_in
        if mode is not None:
            for t in _tensors_of(module):
                memo[id(t)] = _on_cpu(t, mode) if on_cpu else mode.from_tensor(t)
            _count_batches(module, memo)
    twin = deep_copy(model, memo)
    for name, stand_in in wrapped:
        own = vars(twin.get_submodule(name))
        own.pop("forward", None)
        for key in [k for k, value in own.items() if value is stand_in or getattr(value, "__self__", None) is stand_in]:
            del own[key]
        if stand_in.previous is not None:
            own["forward"] = copy.deepcopy(stand_in.previous, memo)
    return twin


def _stand_in(module: torch.nn.Module) -> Any:
    """What stands in for the forward of a compressed module, or None."""
    found = module.__dict__.get(STAND_IN)
    return found if found is not None and found.in_force else None


def _count_batches(module: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Give the fake counter of a batch norm without momentum a value: its mean over all batches divides by it."""
    counter = getattr(module, "num_batches_tracked", None)
    if isinstance(module, _BatchNorm) and module.momentum is None and counter is not None:
        fake = memo[id(counter)]
        known = not (isinstance(counter, FakeTensor) or counter.is_meta)
        fake.constant = counter.detach().to(fake.device, copy=True) if known else torch.zeros((), dtype=counter.dtype)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """A module's own parameters, buffers and plain tensor attributes."""
    for table in (module._parameters, module._buffers, module.__dict__):
        yield from (t for t in table.values() if isinstance(t, torch.Tensor))


def _on_cpu(t: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor like t, wherever t is."""
    if t.device.type == "cpu" and not isinstance(t, FakeTensor):
        return mode.from_tensor(t)
    with mode, torch.no_grad():
        fake = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu")
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(fake, t.requires_grad)
    return fake.requires_grad_(t.requires_grad)


def _inputs(item: Any, mode: FakeTensorMode | None, on_cpu: bool = False) -> Any:
    """Nested arguments with their tensors as fake ones of the mode; one tensor given twice stays one."""
    made: dict[int, torch.Tensor] = {}

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in made:
            made[id(t)] = t if mode is None else _input(t, mode, on_cpu)
        return made[id(t)]

    return tree_map_only(torch.Tensor, fake, item)


def _input(t: torch.Tensor, mode: FakeTensorMode, on_cpu: bool) -> torch.Tensor:
    if on_cpu:
        fake = _on_cpu(t.detach(), mode)
    elif isinstance(t, FakeTensor):
        with mode:
            fake = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device)
    else:
        fake = mode.from_tensor(t.detach())
    fake.requires_grad_(t.requires_grad)
    if not t.is_leaf:
        with mode:
            return fake.clone()
    return fake


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Casts of a copy's weights must not enter the caller's autocast cache, which would hold them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def untouched_random_states() -> Iterator[None]:
    """Puts the random states of torch, Python and NumPy back; a device's only where it is in use already."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    in_python, in_numpy = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(in_python)
            numpy.random.set_state(in_numpy)
