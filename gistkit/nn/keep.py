"""What one backward node keeps of a tensor, and for how long; backward functions that say what cannot be done twice.

The ops of :mod:`gistkit.functional` take a ``keep`` argument, a callable ``tensor -> Kept``: the runtime's shares a
stash between several nodes; users have :func:`keep_dense` and :func:`keep_coded`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

import torch

from gistkit.codecs import CODECS, Encoded, unchanged
from gistkit.codecs import codec as codec_named

is_retained = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
"""Whether the graph of the running backward is retained."""
PACKED = type
"""The pack half of a saved-tensor hook whose unpack half is the ``dense`` of a hold: C, which keeps nothing."""
USED_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved "
    "tensors after calling backward."
)
TWICE = (
    "trying to differentiate twice through an operation of gistkit, which keeps no more than its first backward needs "
    "(once_differentiable); call gistkit.restore(model) where gradients of gradients are wanted, or run that forward "
    "alone under torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), where it is plain PyTorch"
)


class Kept(Protocol):
    """One node's hold on one forward tensor."""

    def dense(self) -> torch.Tensor:
        """The tensor, same shape, strides, dtype; bit-exact unless a lossy codec was asked for. May be an alias."""
        ...

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """ReLU's input gradient, the kept tensor being its output; exact also under lossy codecs."""
        ...


Keep = Callable[[torch.Tensor], Kept]


class SavedAsIs:
    """The tensor itself, with PyTorch's check that nobody wrote to it in between."""

    __slots__ = ("__weakref__", "_version", "_x")

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x.detach()
        self._version = x._version

    def dense(self) -> torch.Tensor:
        return self._x if self._x._version == self._version else unchanged(self._x, self._version)

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.threshold_backward(grad, self.dense(), 0)


class Coded:
    """A payload of one codec, decoded for each use."""

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded

    def dense(self) -> torch.Tensor:
        return CODECS[self.encoded.codec].decode(self.encoded)

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return CODECS[self.encoded.codec].relu_backward(self.encoded, grad)


class SingleUse:
    """What a node's saved tensor is replaced by: let go of when it is unpacked, unless the graph is retained."""

    __slots__ = ("_kept",)

    def __init__(self, kept: Kept) -> None:
        self._kept: Kept | None = kept

    def dense(self, _: Any = None) -> torch.Tensor:
        kept = self._kept
        if kept is None:
            raise RuntimeError(USED_TWICE)
        if not is_retained():
            self._kept = None
        return kept.dense()


def replace_saved(node: Any, field: str, kept: Kept) -> None:
    """Have a node hold ``kept`` in place of the tensor that it saved as ``field`` (autograd's name without
    ``_saved_``); where that is the tensor itself, PyTorch's own hold stays, with its check against writes.

    The node must have saved it under no saved-tensor hooks.
    """
    if type(kept) is not SavedAsIs:
        getattr(node, f"_raw_saved_{field}").register_hooks(PACKED, SingleUse(kept).dense)


def keep_dense(x: torch.Tensor) -> Kept:
    """Keep the tensor itself."""
    return SavedAsIs(x)


def keep_coded(codec: str) -> Keep:
    """Keep the tensor under a codec of CODECS; the callable can be pickled. Raises ValueError for any other name."""
    return partial(_coded, codec_named(codec).name)


def _coded(codec: str, x: torch.Tensor) -> Kept:
    return Coded(CODECS[codec].encode(x))


class Away:
    """A node's hold whose tensors lie elsewhere until the node runs; no ABC, of which ``isinstance`` is slow."""

    def back(self) -> Any:
        """The hold as the node knows it."""
        raise NotImplementedError


def take(ctx: Any) -> Any:
    """The node's hold ``ctx.kept``, let go of unless the graph is retained; PyTorch's own error at a second use."""
    kept = ctx.kept
    if kept is None:
        raise RuntimeError(USED_TWICE)
    if not is_retained():
        ctx.kept = None
    return kept.back() if isinstance(kept, Away) else kept


def once_differentiable(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """A Function's backward, of (ctx, gradient of its one result); not called where there is no gradient. It must
    :func:`take` what is kept. A backward through its results raises RuntimeError.

    ``torch.autograd.function.once_differentiable`` refuses only where the incoming gradient requires one, and not on
    the way to any leaf: the penalty of ``autograd.grad(model(x).sum(), x, create_graph=True)`` would be a constant, and
    ``autograd.functional.hessian`` would return zeros. Here every result of a backward with ``create_graph=True``
    refuses.
    """

    @wraps(backward)
    def run(ctx: Any, grad: torch.Tensor | None) -> tuple:
        if grad is None:
            take(ctx)
            return (None,) * len(ctx.needs_input_grad)
        if not torch.is_grad_enabled():
            return backward(ctx, grad)
        with torch.no_grad():
            results = backward(ctx, grad)
        behind = [grad, *_leaves(ctx)]
        refuse = torch._C._functions.DelayedError(TWICE.encode(), len(results) + len(behind))  # type: ignore[attr-defined]
        return refuse(*(None if r is None else r.detach() for r in results), *behind)[: len(results)]

    return run


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without what its Python half does for function transforms (4 us a call), which
    :func:`gistkit.nn.eligible.covered` operands never meet."""
    if torch.compiler.is_compiling():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _leaves(node: Any) -> list[torch.Tensor]:
    stack, seen, leaves = [node], {node}, []
    while stack:
        for edge, _ in stack.pop().next_functions:
            if edge is None or edge in seen:
                continue
            seen.add(edge)
            stack.append(edge)
            if isinstance(getattr(edge, "variable", None), torch.Tensor):
                leaves.append(edge.variable)
    return leaves
