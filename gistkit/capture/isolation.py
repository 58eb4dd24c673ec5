"""The copy of a model that a capture runs in its place, with fake parameters, buffers and inputs, and contexts in which
it leaves the caller's process as it was: random states, autocast, the gradients of others, and loss functions that
close over the model."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from gistkit.capture.fakes import empty_fake, fills_storage
from gistkit.capture.nodes import is_accumulator, reachable


@contextmanager
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


class _Collection:
    """How many contexts of any threads have turned the collection off, and whether it was on before the first."""

    lock = threading.Lock()
    off, was_on = 0, False


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns Python's collection of cyclic garbage off, until the last such context of all threads ends: captures and
    plans make millions of small objects that stay, of which a full collection beside PyTorch takes 0.2 s, and by chance
    it would end lives that are being watched, or a CUDA graph while another one is captured."""
    with _Collection.lock:
        if not _Collection.off:
            _Collection.was_on = gc.isenabled()
        gc.disable()
        _Collection.off += 1
    try:
        yield
    finally:
        with _Collection.lock:
            _Collection.off -= 1
            if not _Collection.off and _Collection.was_on:
                gc.enable()


@contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Casts of a copy's weights must not enter the caller's autocast cache, which would hold them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def left_behind() -> Iterator[None]:
    """As in a loop that has left its autocast context, whose cache of casts goes then: what is cast within lives no
    longer than its readers or a context entered within (a checkpoint's, whose forward runs again in backward). Whether
    autocast is on stays. Costs about 1 us."""
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


class _OnCopy(TorchFunctionMode):
    """Hands functions the copy's parameters and buffers where they are given the model's."""

    def __init__(self, model: torch.nn.Module, twin: torch.nn.Module) -> None:
        super().__init__()
        own, copied = ([*m.parameters(), *m.buffers()] for m in (model, twin))
        self._copies = {id(t): of for t, of in zip(own, copied, strict=True)}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given: Any = tree_map_only(torch.Tensor, lambda t: self._copies.get(id(t), t), (args, kwargs or {}))
        return func(*given[0], **given[1])


def on_copy(loss_fn: Callable | None, model: torch.nn.Module, twin: torch.nn.Module) -> Callable | None:
    """The loss function, reading the copy's parameters and buffers for the model's, as a penalty on weights does."""
    if loss_fn is None:
        return None

    def on_twin(*args: Any) -> Any:
        with _OnCopy(model, twin):
            return loss_fn(*args)

    return on_twin


@contextmanager
def others_untouched(loss: torch.Tensor, own: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put the gradients of all leaves of a loss back in the end but for those of ``own``: a criterion's parameters, or
    those of a module that the model holds in secret. Meanwhile they have none."""
    ids = {id(t) for t in own}
    leaves = (node.variable for node in reachable([loss]) if is_accumulator(node))
    before = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in ids]
    for leaf, _ in before:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in before:
            leaf.grad = grad


STAND_IN = "_gistkit"
"""The name in ``module.__dict__`` of what stands in for a compressed module's forward. While it is ``in_force``, a
copy runs ``previous`` in its place, which was in ``__dict__["forward"]`` before (None: the class's forward)."""
_SHARED = ("_graph", "meta")  # of a GraphModule's attributes: its forward does not read them, they may hold anything


def stand_in_of(module: torch.nn.Module) -> Any:
    """What stands in for the forward of a compressed module, or None."""
    found = module.__dict__.get(STAND_IN)
    return found if found is not None and found.in_force else None


def plain_copy(model: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """``copy.deepcopy(model, memo)`` of which no part is compressed. GraphModules get all that theirs have, where their
    own deepcopy loses what the graph does not name and a replaced forward. The copies share their class, which has the
    code: they must not be recompiled."""
    memo = {} if memo is None else memo
    modules = dict(model.named_modules())
    wrapped = {name: found for name, module in modules.items() if (found := stand_in_of(module)) is not None}
    memo.update({id(found): found for found in wrapped.values()})
    graphs = [part for part in modules.values() if isinstance(part, GraphModule)]
    memo.update({id(part): object.__new__(type(part)) for part in graphs})
    # a module has about 15 tables of hooks, empty ones mostly, of which deepcopy takes 10 us each
    tables = (table for module in modules.values() for table in vars(module).values())
    memo.update({id(t): type(t)() for t in tables if type(t) in (dict, OrderedDict, set) and not t})
    for part in graphs:
        own = {name: value if name in _SHARED else copy.deepcopy(value, memo) for name, value in vars(part).items()}
        memo[id(part)].__dict__.update(own)
    twin = copy.deepcopy(model, memo)
    for name, found in wrapped.items():
        own = vars(twin.get_submodule(name))
        own.pop("forward", None)
        for key in [k for k, value in own.items() if value is found or getattr(value, "__self__", None) is found]:
            del own[key]
        if found.previous is not None:
            own["forward"] = copy.deepcopy(found.previous, memo)
    return twin


def fake_twin(model: torch.nn.Module, mode: FakeTensorMode, on_cpu: bool) -> torch.nn.Module:
    """A copy whose parameters, buffers and tensor attributes are fake, on the CPU if ``on_cpu``; ties stay."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers, module.__dict__):
            tensors = (t for t in table.values() if isinstance(t, torch.Tensor))
            memo.update({id(t): _fake(t, mode, on_cpu) for t in tensors})
        counter = getattr(module, "num_batches_tracked", None)
        if isinstance(module, _BatchNorm) and module.momentum is None and counter is not None:
            fake = memo[id(counter)]  # has a value: the mean over all batches divides by it
            known = not (isinstance(counter, FakeTensor) or counter.is_meta)
            fake.constant = (
                counter.detach().to(fake.device, copy=True) if known else torch.zeros((), dtype=counter.dtype)
            )
    return plain_copy(model, memo)


def fake_inputs(item: Any, mode: FakeTensorMode, on_cpu: bool) -> Any:
    """Nested arguments with their tensors as fake ones of the mode; one tensor given twice stays one."""
    made: dict[int, torch.Tensor] = {}

    def fake(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in made:
            leaf = _fake(t.detach(), mode, on_cpu).requires_grad_(t.requires_grad)
            with mode:
                made[id(t)] = leaf if t.is_leaf else leaf.clone()
        return made[id(t)]

    return tree_map_only(torch.Tensor, fake, item)


def _fake(t: torch.Tensor, mode: FakeTensorMode, on_cpu: bool) -> torch.Tensor:
    """``mode.from_tensor(t)``, at a tenth of its time where nothing else is on the tensor's storage."""
    real = not isinstance(t, FakeTensor) and (t.device.type == "cpu" or not on_cpu)
    known = mode.fake_tensor_converter.meta_converter
    if real and (not _is_plain(t) or t.untyped_storage() in known.describer.lookup_storage):
        return mode.from_tensor(t)
    fake = empty_fake(mode, t.size(), t.stride(), t.dtype, torch.device("cpu") if on_cpu else t.device)
    if isinstance(t, torch.nn.Parameter):
        fake._is_param = True
    if real:  # others that share the tensor or its storage come to the same
        known.storage_memo[known.describer.get_storage_id(t.untyped_storage())] = fake.untyped_storage()
        mode.fake_tensor_converter.set_tensor_memo(t, fake)
    return fake.requires_grad_(t.requires_grad)


def _is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor is a leaf of no subclass, is all of its storage and has nothing that a copy of it would miss."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout != torch.strided or t.is_meta or t.is_inference():
        return False
    if t.is_quantized or t.is_complex() or t.is_neg() or not t.is_leaf or t._is_view() or t.grad is not None:
        return False
    return fills_storage(t) and getattr(t, "grad_dtype", t.dtype) in (None, t.dtype)
