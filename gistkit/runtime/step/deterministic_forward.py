"""Runs of a module that depend on their inputs alone, so that two of them can be compared; the module is not touched.

A run is that of a copy (:func:`isolated`) within :func:`deterministic`, which takes the random draws out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from gistkit.capture import no_autocast_cache, tensors_in, untouched_random_states
from gistkit.runtime.attach import compressed_forward, restore

OFF = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}
"""Arguments of operators that draw random numbers, by which they draw none."""
NOISE = 0.1
"""The size of the values that stand for parameters which are all zero, as the last ones of a block or a head often are
at first: zeros would hide everything before them."""


class ConstantDraws(TorchDispatchMode):
    """Random operators give what depends on no generator and no row: dropouts and dropped paths keep everything, other
    draws are constants, so permutations take the first row for all and mixed rows differ from unmixed ones."""

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
            t.fill_(1 if "bernoulli" in func._schema.name else 0.5 if t.is_floating_point() else 0)
        return drawn


@contextmanager
def deterministic() -> Iterator[None]:
    """Around a run without gradients: it begins with the random states of now and leaves them so."""
    with untouched_random_states(), torch.no_grad(), no_autocast_cache(), ConstantDraws():
        yield


def own_copy(t: torch.Tensor) -> torch.Tensor:
    """A copy's tensor for ``t``, which may be ``t``."""
    if not _copied(t):
        return t
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(torch.empty_like(t).uniform_(-NOISE, NOISE), t.requires_grad)
    return t.detach().clone()


def _copied(t: torch.Tensor) -> bool:
    """Whether a copy has a tensor of its own for ``t``: noise for a parameter of zeros, a clone of what is no parameter
    and may be written to."""
    return t.is_floating_point() and not t.any() if isinstance(t, torch.nn.Parameter) else not t.requires_grad


def copied_bytes(model: torch.nn.Module) -> int:
    """What a copy has of its own."""
    return sum(t.untyped_storage().nbytes() for t in tensors_of(model) if _copied(t))


def isolated(
    model: torch.nn.Module, tensor: Callable[[torch.Tensor], torch.Tensor] = own_copy, given_statistics: bool = False
) -> torch.nn.Module:
    """A deep copy of a model, uncompressed, with ``tensor(t)`` for each of its tensors. With ``given_statistics`` its
    batch norms normalise by their running statistics, or by 0 and 1."""
    memo: dict[int, Any] = {}
    with untouched_random_states(), torch.no_grad():
        for t in tensors_of(model):
            memo[id(t)] = tensor(t)
        copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if compressed_forward(module) is not None:  # which knows its model: a cycle that waits for the collector
            restore(module)
        if given_statistics and isinstance(module, _BatchNorm):
            module.eval()
            if module.running_mean is None:
                like = next(copied.parameters())
                module.running_mean = like.new_zeros(module.num_features)
                module.running_var = like.new_ones(module.num_features)
    return copied


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """A model's parameters, buffers and plain tensor attributes, each once."""
    tables = (table for m in model.modules() for table in (m._parameters, m._buffers, vars(m)))
    return list({id(t): t for table in tables for t in table.values() if isinstance(t, torch.Tensor)}.values())


__all__ = ["copied_bytes", "deterministic", "isolated", "tensors_of"]
