"""What the runtime did because of calls that are still to come, and what it does when they do not come.

Two moves of a plan lean on the future: a ReLU keeps nothing because the pool after it will carry its mask, and a ReLU
overwrites its input because nobody will read that again. Both tensors are watched until the region ends. A reader of
the first that is not that pool makes the ReLU keep its mask after all; a reader of the second comes too late and is an
error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gistkit.capture import call_name
from gistkit.errors import GistError, PlanMismatchError
from gistkit.kernels import flat, like, ops
from gistkit.runtime.stash.stash import aligned

REMEDY = (
    "the model's control flow changed since it was captured: run the step again, no ReLU of this model overwrites its "
    "input any more"
)
BEHIND = ("grad_fn", "grad")
"""Properties that lead to a tensor's gradient, not to its values."""


class Promise:
    """A ReLU's hold that is empty as long as a pool carries its mask, and the pool's gradient is all that arrives."""

    def __init__(self) -> None:
        self.carried = False
        self._masked: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._stride: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return 0 if self._mask is None else self._mask.numel()

    def settle(self, y: torch.Tensor) -> None:
        """Keep the mask after all: y is the ReLU's output, unchanged. Masking twice changes nothing."""
        if self._mask is None:
            y = y.detach()
            self._mask, self._stride = ops.mask1_encode(flat(y)), y.stride()

    def carry(self, pool: Any) -> None:
        """The pool's backward node masks the gradient from now on; the very tensor that it makes is remembered, for a
        reader that no function mode sees (scripted code) would add to it what needs a mask."""
        self.carried = True
        pool.register_hook(self._expect)

    def _expect(self, grads: tuple, _: tuple) -> None:
        self._masked = grads[0]

    def dense(self) -> torch.Tensor:
        raise GistError(
            "a ReLU's output must be read by the max-pool after it alone, which carries its mask, and something else "
            "asks for its values now; call gistkit.restore(model), or compress the model's other parts only"
        )

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        masked, self._masked = self._masked, None
        if self._mask is None and self.carried:
            if masked is not grad:
                raise GistError(
                    "a ReLU's output was used by something besides the max-pool after it that the model's first "
                    "forward did not show (scripted code, a hook on a backward node), and the ReLU kept no mask for "
                    "it; call gistkit.restore(model), or compress the model's other parts only"
                )
            return grad
        if self._mask is None:
            raise GistError(
                "backward through a ReLU whose pool never ran: the forward stopped between them; run the forward again"
            )
        ordered = aligned(grad, self._stride)
        if ordered is grad:
            return like(ops.mask1_backward(flat(grad), self._mask), tuple(grad.size()), self._stride)
        ops.mask1_backward_(flat(ordered), self._mask)
        return ordered


@dataclass
class _Watched:
    tensor: weakref.ref
    promise: Promise | None
    version: int
    call: int


class Watch:
    """The tensors of one region that must meet no unplanned reader, by id; ``broken`` once an overwritten one did."""

    def __init__(self) -> None:
        self.broken = False
        self.items: dict[int, _Watched] = {}

    def promise(self, y: torch.Tensor, promise: Promise) -> None:
        """Watch the output of a ReLU that keeps nothing."""
        self.items[id(y)] = _Watched(self._reference(y), promise, y._version, -1)

    def overwritten(self, x: torch.Tensor, call: int) -> None:
        """Watch a tensor whose memory the ReLU of that number took over."""
        self.items[id(x)] = _Watched(self._reference(x), None, x._version, call)

    def _reference(self, t: torch.Tensor) -> weakref.ref:
        """A weak reference that takes t off the list when nobody can read it any more: every call asks the list."""
        items, key = self.items, id(t)

        def gone(ref: weakref.ref) -> None:
            item = items.get(key)
            if item is not None and item.tensor is ref:
                del items[key]

        return weakref.ref(t, gone)

    def find(self, y: torch.Tensor) -> Promise | None:
        """The promise that hangs on y as the ReLU left it; None where there is none."""
        item = self.items.get(id(y))
        if item is None or item.tensor() is not y or item.version != y._version:
            return None
        return item.promise

    def touch(self, func: Callable, args: Iterable, kwargs: Mapping) -> None:
        """Called before every function call of the region that is not the planned pool and reads more than metadata."""
        items = self.items
        if not items:
            return
        for x in args:
            if id(x) in items:
                self._meet(x, func)
            elif isinstance(x, (list, tuple)):
                self.touch(func, x, {})
        if kwargs:
            self.touch(func, kwargs.values(), {})

    def _meet(self, x: torch.Tensor, func: Callable) -> None:
        item = self.items.get(id(x))
        name = call_name(func)
        if item is None or item.tensor() is not x or (item.promise is None and name in BEHIND):
            return
        if item.promise is None:
            self.broken = True
            raise PlanMismatchError(f"no reader of the input of ReLU {item.call} after it", f"a call of {name}", REMEDY)
        del self.items[id(x)]
        item.promise.settle(x)

    def settle_all(self) -> None:
        """Keep the masks of all ReLUs whose pool has not come."""
        for key, item in list(self.items.items()):
            y = item.tensor()
            if item.promise is not None:
                self.items.pop(key, None)
                if y is not None and not item.promise.carried:
                    item.promise.settle(y)

    def close(self) -> None:
        """The region ends: settle what is open; an overwritten tensor that is still alive is an error."""
        self.settle_all()
        for item in list(self.items.values()):
            if item.tensor() is not None:
                self.broken = True
                raise PlanMismatchError(
                    f"the input of ReLU {item.call} to be gone when the forward ends",
                    "a reference to it that is still alive",
                    REMEDY,
                )
        self.items.clear()
