"""The copy of a model that a capture runs in its place, with fake parameters, buffers and inputs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from gistkit.capture.fakes import empty_fake, fills_storage

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
