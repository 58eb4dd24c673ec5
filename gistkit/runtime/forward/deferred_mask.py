"""A ReLU's mask that the max-pool behind it carries in its map, so that the ReLU keeps nothing."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.errors import GistError
from gistkit.nn.keep import Kept, keep_coded
from gistkit.runtime.program.program import Program


class DeferredMask:
    """A ReLU's hold on its mask until the next covered call: if that is the planned max-pool, its backward zeroes the
    gradient where the ReLU's output was not positive, and nothing is kept; else the mask is stored (:meth:`store`).
    ``program``: what is stale where another reader turns up. Storing it as well would be safe: masking is idempotent. A
    reader of the ReLU's output behind the pool would not: so backward demands the pool node's very gradient."""

    def __init__(self, program: Program | None) -> None:
        self._program = program
        self._carried = False
        self._masked: torch.Tensor | None = None
        self._stored: Kept | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._stored is None else self._stored.encoded.nbytes  # type: ignore[attr-defined]

    def store(self, y: torch.Tensor) -> None:
        if self._stored is None:
            self._stored = keep_coded("mask1")(y.detach())

    def carry(self, pool: Any) -> None:
        """The pool's backward node masks the gradient from now on."""
        self._carried = True
        pool.register_hook(self._expect)

    def _expect(self, grads: tuple, _: tuple) -> None:
        self._masked = grads[0]

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        masked, self._masked = self._masked, None
        if self._stored is not None:
            return self._stored.relu_backward(grad)
        if not self._carried:
            raise GistError(
                "backward through a ReLU whose pool never ran: the forward stopped between them; run the forward again"
            )
        if masked is grad:
            return grad
        if self._program is not None:
            self._program.is_stale = True
        raise GistError(
            "a ReLU's output was used by something besides the max-pool after it, which the forward did not do when "
            "it was captured, and the ReLU kept no mask for it; run the step again: the model is captured anew at its "
            "next forward"
        )
