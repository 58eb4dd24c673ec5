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
from gistkit.runtime.recompute.calls import RecordedCall, ReplayError, geometry
from gistkit.runtime.recompute.replay import run_anew


class RecomputedBody:
    """A stash whose storage its segment's replay gives back; the values stay from then on until the last reader goes.
    Readers share them, so none may overwrite them (``fresh``).

    ``time`` is twice the number of the call at which it was saved, plus one where that call had written it already.
    """

    fresh = False

    def __init__(self, segment: Segment, storage: int, time: int, x: torch.Tensor) -> None:
        self._segment, self.storage, self.time, self.dtype = segment, storage, time, x.dtype
        self._like = geometry(x)
        self.values: torch.Tensor | None = None
        """What it holds now."""
        self.check: Callable[[torch.Tensor], None] | None = None
        """Looks at the values when they come back; raises where they are wrong."""

    @property
    def nbytes(self) -> int:
        return 0 if self.values is None else self.values.untyped_storage().nbytes()

    def dense(self) -> torch.Tensor:
        """The whole storage; replays the segment where that has not happened."""
        if self.values is None and not self._segment.complete:
            return self._segment.run([self])[0][1]
        if self.values is None:
            self._segment.replay()
        if self.values is None:
            raise ReplayError(f"storage {self.storage} did not come back when its segment ran anew")
        return self.values

    def dense_range(self, start: int, stop: int) -> torch.Tensor:
        return flat(self.dense())[start:stop]

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.threshold_backward(grad, self.dense().as_strided(*self._like), 0)


class Segment:
    """One segment of one forward: its calls, its holds, and who wants what of it."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.holds: list[Kept] = []
        self.complete = False
        """Whether the forward has returned, so that nothing more is written down."""
        self._bodies: list[weakref.ref[RecomputedBody]] = []
        self._lock = threading.RLock()

    def body(self, storage: int, time: int, x: torch.Tensor) -> RecomputedBody:
        """A stand-in for x, saved at a time of the forward."""
        body = RecomputedBody(self, storage, time, x)
        self._bodies.append(weakref.ref(body))
        return body

    def run(self, wanted: list[RecomputedBody]) -> list[tuple[RecomputedBody, torch.Tensor]]:
        """Those of the stand-ins that came back, with their values, which they do not keep."""
        given: list[tuple[RecomputedBody, torch.Tensor]] = []

        def hear(body: RecomputedBody, values: torch.Tensor) -> None:
            if body.check is not None:
                body.check(values)
            given.append((body, values))

        with self._lock:
            run_anew(self.calls, self.holds, wanted, hear)
        return given

    def replay(self) -> None:
        """Give every stand-in that somebody still holds its values, then let go of calls and holds."""
        with self._lock:
            wanted = [b for b in (ref() for ref in self._bodies) if b is not None and b.values is None]
            for body, values in self.run(wanted):
                body.values = values
            self.calls, self.holds, self._bodies = [], [], []
