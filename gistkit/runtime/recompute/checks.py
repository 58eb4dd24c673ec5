"""Storages of segments are believed to come back once they have, in each shape and dtype and on each device.

One that has not yet is kept as it is until its segment has passed; then the segment runs anew at once, and what it
gives is compared bit for bit. Under a budget, where no second such tensor has room, a digest is taken, and compared
when backward runs the segment anew.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gistkit.kernels import flat
from gistkit.runtime.recompute.calls import ReplayError
from gistkit.runtime.recompute.recompute import RecomputedBody, Segment
from gistkit.runtime.recompute.replay import run_anew
from gistkit.runtime.stash.stash import whole
from gistkit.runtime.stash.verify import Digest, same_bits

Refuse = Callable[[int, str], None]
DIFFERS = "it does not come back bit for bit on this device"


class Checks:
    """One forward's: ``verified`` is what is known of storages by key, None where nothing is checked.
    ``refuse(storage, why)`` notes that one stays dense; ``later()``: whether it raises, for a budget."""

    def __init__(self, verified: dict | None, refuse: Refuse, later: Callable[[], bool]) -> None:
        self._verified, self._refuse, self._later = verified, refuse, later
        self.waiting: dict[int, list[tuple[RecomputedBody, tuple]]] = {}
        """By segment the stand-ins that are still to be compared, each with its key."""

    def known(self, key: tuple) -> bool | None:
        """Whether a storage comes back; None where nobody knows."""
        return True if self._verified is None else self._verified.get(key)

    def add(self, segment: int, body: RecomputedBody, key: tuple, x: torch.Tensor, written: bool) -> None:
        """A stand-in for x of which nobody knows. ``written``: x is overwritten while the forward runs."""
        kept = x.detach()
        if self._later():
            body.check = self._when_back(Digest(whole(kept)), key, body.storage)
        else:
            body.values = whole(kept).clone() if written else whole(kept)
            self.waiting.setdefault(segment, []).append((body, key))

    def _when_back(self, digest: Digest, key: tuple, storage: int) -> Callable[[torch.Tensor], None]:
        verified, refuse = self._verified, self._refuse
        assert verified is not None

        def check(values: torch.Tensor) -> None:
            verified[key] = digest.matches(values)
            if not verified[key]:
                refuse(storage, DIFFERS)

        return check

    def compare(self, index: int, segment: Segment) -> None:
        """Run that segment, which has passed, anew, and let go of what has come back; the rest stays as it is."""
        pending = self.waiting.pop(index)
        dense = {id(body): body.values for body, _ in pending}
        same: dict[int, bool] = {}

        def hear(body: RecomputedBody, values: torch.Tensor) -> None:
            kept = dense.pop(id(body))
            # what was saved may be a view: an instance norm saves its input with a channel for each of a batch's maps
            same[id(body)] = kept is not None and same_bits(flat(kept), flat(values))
            if same[id(body)]:
                body.values = None

        try:
            run_anew(segment.calls, segment.holds, [body for body, _ in pending], hear)
        except ReplayError:
            same.clear()
        assert self._verified is not None
        for body, key in pending:
            self._verified[key] = same.get(id(body), False)
            if not self._verified[key]:
                self._refuse(body.storage, DIFFERS)
