"""The link to the host on the simulator's clock: one queue for each direction, first in, first out.

A transfer runs at its direction's own rate; while both directions are busy they share ``both_gbps`` where that is less
than the sum of theirs. What is left of a transfer is counted in seconds of a link to itself.
"""

from __future__ import annotations

import math
from collections import deque

from gistkit.planning.cost import CostTable
from gistkit.planning.simulate.intervals import Transfer

DIRECTIONS: tuple[str, ...] = ("d2h", "h2d")


class Link:
    """The state of both queues at ``now``."""

    def __init__(self, costs: CostTable) -> None:
        rates = costs.hardware
        alone = rates.d2h_gbps + rates.h2d_gbps
        self._costs = costs
        self._shared = min(1.0, rates.both_gbps / alone) if alone else 1.0
        self.now = 0.0
        self._left: dict[str, deque[float]] = {d: deque() for d in DIRECTIONS}
        self._issued = dict.fromkeys(DIRECTIONS, 0)
        self._done = dict.fromkeys(DIRECTIONS, 0)
        self.carried_bytes = dict.fromkeys(DIRECTIONS, 0)

    def issue(self, transfer: Transfer) -> int:
        """Put a transfer at the end of its queue; its number in that direction."""
        direction = transfer.direction
        seconds = self._costs.d2h_s(transfer.nbytes) if direction == "d2h" else self._costs.h2d_s(transfer.nbytes)
        self._left[direction].append(seconds)
        self.carried_bytes[direction] += transfer.nbytes
        self._issued[direction] += 1
        return self._issued[direction]

    def finish(self, direction: str, number: int) -> float:
        """Run until transfer ``number`` of a direction is done; the time then, not before ``now``."""
        while self._done[direction] < number:
            self._run(math.inf)
        return self.now

    def advance(self, until: float) -> None:
        """Run until a moment, if that is still to come."""
        while self.now < until:
            self._run(until)

    def _run(self, until: float) -> None:
        """Run until the next transfer ends, at most until a moment."""
        busy = [d for d in DIRECTIONS if self._left[d]]
        if not busy:
            self.now = until
            return
        rate = self._shared if len(busy) == 2 else 1.0
        first = min(self._left[d][0] for d in busy) / rate
        span = min(first, until - self.now)
        ends = span == first
        for direction in busy:
            queue = self._left[direction]
            if ends and queue[0] / rate <= first:
                queue.popleft()
                self._done[direction] += 1
            else:
                queue[0] -= span * rate
        self.now = self.now + span if ends or until == math.inf else until
