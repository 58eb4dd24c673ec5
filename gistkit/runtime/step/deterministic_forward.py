"""A forward without what differs from call to call: random draws, batch statistics, state that it leaves behind.

What is left depends on the given rows alone, so two forwards can be compared. The model itself is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gistkit.capture import no_autocast_cache, tensors_in, untouched_random_states
from gistkit.runtime.attach import compressed_forward, restore

OFF = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}
"""Arguments of operators that draw random numbers, by which they draw none."""
NOISE = 0.1
"""Of what stands for weights that are all zero, as the last ones of a block or a head often are at first: behind them
nothing would be seen."""


class SteadyDraws(TorchDispatchMode):
    """Random operators give what depends on no generator and no row: dropouts and dropped paths keep everything, other
    draws are constants, and permutations turn the order around, so that rows which are mixed differ."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if any(name in OFF for name in names):
            args = tuple(OFF.get(name, value) for name, value in zip(names, args, strict=False))
            return func(*args, **{name: OFF.get(name, value) for name, value in kwargs.items()})
        drawn = func(*args, **kwargs)
        for t in tensors_in(drawn):
            _settle(t, func._schema.name)
        return drawn


def _settle(drawn: torch.Tensor, name: str) -> None:
    if "randperm" in name:
        drawn.copy_(torch.arange(len(drawn) - 1, -1, -1, dtype=drawn.dtype, device=drawn.device))
    elif "bernoulli" in name:
        drawn.fill_(1)
    else:
        drawn.fill_(0.5 if drawn.is_floating_point() else 0)


class GivenStatistics(TorchFunctionMode):
    """Notes in ``seen`` that a batch norm took the statistics of its batch; where that is ``accepted``, it takes given
    ones instead."""

    def __init__(self, accepted: bool) -> None:
        super().__init__()
        self.accepted, self.seen = accepted, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        x: torch.Tensor,
        mean: torch.Tensor | None,
        var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        *rest: float,
        **named: float,
    ) -> torch.Tensor:
        if training or mean is None or var is None:
            self.seen = True
            if self.accepted:
                like = x if weight is None else weight
                mean = like.new_zeros(x.shape[1]) if mean is None else mean
                var = like.new_ones(x.shape[1]) if var is None else var
                training = False
        return F.batch_norm(x, mean, var, weight, bias, training, *rest, **named)


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy that shares the parameters and has buffers of its own; weights that are all zero are noise."""
    memo: dict[int, Any] = {}
    with untouched_random_states(), torch.no_grad():
        for t, copied in tensors_of(model):
            if copied:
                noise = isinstance(t, torch.nn.Parameter)
                memo[id(t)] = _noise(t) if noise else t.detach().clone()
            else:
                memo[id(t)] = t
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if compressed_forward(module) is not None:  # which knows its model: a cycle, that waits for the collector
            restore(module)
    return copied


def copied_bytes(model: torch.nn.Module) -> int:
    """What :func:`twin` takes."""
    return sum(t.untyped_storage().nbytes() for t, copied in tensors_of(model) if copied)


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """A model's parameters, buffers and plain tensor attributes, each once, and whether its twin has its own."""
    found: set[int] = set()
    for module in model.modules():
        for table in (module._parameters, module._buffers, vars(module)):
            for name, t in table.items():
                if isinstance(t, torch.Tensor) and not is_lazy(t) and id(t) not in found:
                    found.add(id(t))
                    own = not t.requires_grad
                    if isinstance(t, torch.nn.Parameter):
                        own = not name.endswith("bias") and t.is_floating_point() and not t.any()
                    yield t, own


def _noise(p: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(p).uniform_(-NOISE, NOISE), p.requires_grad)


@contextmanager
def steady(statistics: GivenStatistics) -> Iterator[None]:
    """Around one forward or loss, without gradients: it begins with the random states of now and leaves them so."""
    with untouched_random_states(), torch.no_grad(), no_autocast_cache(), SteadyDraws(), statistics:
        yield


def called(function: Callable, args: tuple, kwargs: dict, statistics: GivenStatistics) -> Any:
    """``function(*args, **kwargs)`` under :func:`steady`."""
    with steady(statistics):
        return function(*args, **kwargs)


__all__ = ["GivenStatistics", "SteadyDraws", "called", "copied_bytes", "steady", "tensors_of", "twin"]
