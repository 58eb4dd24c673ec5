"""Storages that come back in backward by running a part of the forward anew (Chen et al., 2016).

A segment's calls are written down in forward (:mod:`gistkit.runtime.recompute.tape`). At the first use of any of its
storages they run once more (:mod:`gistkit.runtime.recompute.replay`), and its stand-ins get their values.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from gistkit.kernels import flat
from gistkit.nn.keep import Kept
from gistkit.runtime.recompute.calls import ReplayError, Written, geometry
from gistkit.runtime.recompute.replay import run_anew


class AgainBody:
    """A stash whose storage its segment's replay gives back; the values stay from then on until the last reader goes.

    ``time`` is twice the number of the call at which it was saved, plus one where that call had written it already.
    """

    def __init__(self, segment: Segment, storage: int, time: int, x: torch.Tensor) -> None:
        self._segment, self.storage, self.time, self.dtype = segment, storage, time, x.dtype
        self._like = geometry(x)
        self._values: torch.Tensor | None = None
        self._check: Callable[[torch.Tensor], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it holds now: none before the replay."""
        return 0 if self._values is None else self._values.untyped_storage().nbytes()

    @property
    def fresh(self) -> bool:
        """Whether :meth:`dense` gives memory that its caller may overwrite: other readers share it."""
        return False

    @property
    def values(self) -> torch.Tensor | None:
        """What it holds now."""
        return self._values

    def expect(self, check: Callable[[torch.Tensor], None]) -> None:
        """Have ``check``, which raises where they are wrong, look at the values when they come back."""
        self._check = check

    def settle(self, values: torch.Tensor | None) -> None:
        """Hold these values, or none."""
        self._values = values

    def checked(self, values: torch.Tensor) -> torch.Tensor:
        """The values that a replay gave, which are right."""
        if self._check is not None:
            self._check(values)
        return values

    def dense(self) -> torch.Tensor:
        """The whole storage; replays the segment where that has not happened."""
        if self._values is not None:
            return self._values
        if not self._segment.complete:
            return self._segment.now(self)
        self._segment.replay()
        if self._values is None:
            raise ReplayError(f"storage {self.storage} did not come back when its segment ran anew")
        return self._values

    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop in storage order."""
        return flat(self.dense())[start:stop]

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """ReLU's input gradient, the ReLU's output being the tensor that was saved."""
        return torch.ops.aten.threshold_backward(grad, self.dense().as_strided(*self._like), 0)


class Segment:
    """One segment of one forward: its calls, its holds, and who wants what of it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls: list[Written] = []
        self.holds: list[Kept] = []
        self.complete = False
        """Whether the forward has returned, so that nothing more is written down."""
        self._bodies: list[weakref.ref[AgainBody]] = []
        self._lock = threading.RLock()

    def body(self, storage: int, time: int, x: torch.Tensor) -> AgainBody:
        """A stand-in for x, saved at a time of the forward."""
        body = AgainBody(self, storage, time, x)
        self._bodies.append(weakref.ref(body))
        return body

    def living(self) -> list[AgainBody]:
        """The stand-ins that somebody still holds."""
        return [b for b in (ref() for ref in self._bodies) if b is not None]

    def now(self, body: AgainBody) -> torch.Tensor:
        """The values of one stand-in while the forward still runs; it does not keep them."""
        given: list[torch.Tensor] = []
        with self._lock:
            run_anew(self.calls, self.holds, [body], lambda b, values: given.append(b.checked(values)))
        return given[0]

    def replay(self) -> None:
        """Give every living stand-in its values, then let go of calls and holds."""
        with self._lock:
            wanted = [b for b in self.living() if b.values is None]
            given: list[tuple[AgainBody, torch.Tensor]] = []
            run_anew(self.calls, self.holds, wanted, lambda b, values: given.append((b, b.checked(values))))
            for body, values in given:
                body.settle(values)
            self.calls, self.holds, self._bodies = [], [], []
