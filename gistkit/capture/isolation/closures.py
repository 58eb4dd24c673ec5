"""Loss functions that close over the model, such as one with a penalty on its weights. During a capture they read the
weights of the model's copy, and the gradients of everything else that they close over are restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from gistkit.capture.walk import is_accumulator, reachable


class _OnCopy(TorchFunctionMode):
    """Hands functions the copy's parameters and buffers where they are given the model's."""

    def __init__(self, model: torch.nn.Module, twin: torch.nn.Module) -> None:
        super().__init__()
        pairs = zip(_tensors(model), _tensors(twin), strict=True)
        self._copies = {id(own): copied for own, copied in pairs}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given: Any = tree_map_only(torch.Tensor, lambda t: self._copies.get(id(t), t), (args, kwargs or {}))
        return func(*given[0], **given[1])


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def on_copy(loss_fn: Callable | None, model: torch.nn.Module, twin: torch.nn.Module) -> Callable | None:
    """The loss function, reading the copy's parameters and buffers wherever it would read the model's."""
    if loss_fn is None:
        return None

    def on_twin(*args: Any) -> Any:
        with _OnCopy(model, twin):
            return loss_fn(*args)

    return on_twin


@contextlib.contextmanager
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
