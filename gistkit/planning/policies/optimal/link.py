"""The link in the program of `optimal`: how much a choice of transfers stalls the step at least.

*Events* are the tasks at which a transfer may begin or must have ended. Between two events a direction of the link
works for no longer than passes: compute seconds, what the choices add to them, and the stalls, which are columns. As a
fluid:

    y_k <= seconds from event k - 1 to k;  waiting_k = waiting_(k-1) + issued at k - 1 - y_k >= 0;
    ahead_k = ahead_(k-1) + y_k - due at k >= 0

With very many events only some are kept: a transfer then counts as issued at the one before and due at the one after,
which bounds less, but validly. The fluid lets a transfer count for another's due time, so a *window* (direction, begin,
end) may be added: whatever is issued in it and due in it is transferred in it. With all windows the bound is that of
earliest-due-first service in parts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from gistkit.planning.policies.optimal.problem import Part, Problem
from gistkit.planning.policies.optimal.rows import Rows
from gistkit.planning.simulate import Transfer

DIRECTIONS = ("d2h", "h2d")
Window = tuple[str, int, int]


class LinkRows:
    """The link's columns (from ``first`` on) and rows. Seconds are in units of 1 / ``unit``."""

    def __init__(self, problem: Problem, parts: Sequence[Part], first: int, unit: float, most: int) -> None:
        self._link, self._unit = problem.link, unit
        every = [(c, t) for c, part in enumerate(parts) for t in part.transfers]
        # Issued and due before the same task: all of it is a stall there, and none of it anything else.
        self._at_once = [(c, t) for c, t in every if t.issue == t.due]
        self._transfers = [(c, t) for c, t in every if t.issue != t.due]
        self.events = sorted({t for _, x in every for t in (x.issue, x.due)})
        self.exact = len(self.events) <= most
        if not self.exact:
            picked = np.unique(np.linspace(0, len(self.events) - 1, most).astype(int))
            self.events = [self.events[i] for i in picked]
        count = len(self.events)
        self.stall = first
        self._y = {d: first + count * (1 + 3 * i) for i, d in enumerate(DIRECTIONS)}
        self.columns = 7 * count
        before = np.concatenate(([0.0], np.cumsum(problem.base_s))) * unit
        self._compute = [0.0] + [float(before[b] - before[a]) for a, b in zip(self.events, self.events[1:])]  # noqa: B905
        self._extra: list[list[tuple[int, float]]] = [[] for _ in range(count + 1)]
        for column, part in enumerate(parts):
            for task, seconds in part.extra:
                k = bisect_right(self.events, task)
                if 0 < k < count:
                    self._extra[k].append((column, seconds * unit))

    def add(self, rows: Rows, windows: Sequence[Window]) -> None:
        """The rows of both directions and of the windows."""
        for direction in DIRECTIONS:
            self._fluid(rows, direction)
            self._hurried(rows, direction)
        self._together(rows)
        for direction, begin, end in windows:
            self._window(rows, direction, begin, end)

    def _fluid(self, rows: Rows, direction: str) -> None:
        count = len(self.events)
        y, waiting, ahead = (self._y[direction] + i * count for i in range(3))
        issued, due = [[] for _ in range(count)], [[] for _ in range(count)]
        for column, t in self._transfers:
            if t.direction == direction:
                issued[self._begins(t.issue)].append((column, self._seconds(t)))
                due[self._ends(t.due)].append((column, self._seconds(t)))
        for k in range(count):
            begun = issued[k - 1] if k else []
            earlier = [(waiting + k - 1, -1.0)] if k else []
            rows.add([(waiting + k, 1.0), *earlier, (y + k, 1.0), *((c, -s) for c, s in begun)], 0.0, 0.0)
            earlier = [(ahead + k - 1, -1.0)] if k else []
            rows.add([(ahead + k, 1.0), *earlier, (y + k, -1.0), *due[k]], 0.0, 0.0)
            rows.add([(y + k, 1.0), *self._passes(k)], high=self._compute[k])

    def _passes(self, k: int) -> list[tuple[int, float]]:
        """Minus what passes between event k - 1 and k beyond the base."""
        return [(self.stall + k, -1.0), *((c, -s) for c, s in self._extra[k])]

    def _hurried(self, rows: Rows, direction: str) -> None:
        """What is issued and due at once stalls for all of its seconds."""
        by_event: dict[int, list[tuple[int, float]]] = {}
        for column, t in self._at_once:
            if t.direction == direction:
                by_event.setdefault(self._ends(t.due), []).append((column, self._seconds(t)))
        for k, terms in by_event.items():
            rows.add([*terms, (self.stall + k, -1.0)], high=0.0)

    def _together(self, rows: Rows) -> None:
        """Both directions at once run at a share of their rates: a span holds no more than the mixtures of one alone,
        the other alone and both at that share."""
        shared = self._link.shared
        if shared > 1 - 1e-9:
            return
        other = min(1.0, (1 - shared) / shared)
        for k in range(len(self.events)):
            for weights in ((1.0, other), (other, 1.0)):
                work = [(self._y[d] + k, w) for d, w in zip(DIRECTIONS, weights, strict=True)]
                rows.add([*work, *self._passes(k)], high=self._compute[k])

    def _window(self, rows: Rows, direction: str, begin: int, end: int) -> None:
        inside = [
            (c, self._seconds(t))
            for c, t in self._transfers
            if t.direction == direction and t.issue >= begin and t.due <= end
        ]
        room = range(self._begins(begin) + 1, self._ends(end) + 1)
        passes = [term for k in room for term in self._passes(k)]
        rows.add([*inside, *passes], high=sum(self._compute[k] for k in room))

    def _begins(self, task: int) -> int:
        """The last event up to a task."""
        return bisect_right(self.events, task) - 1

    def _ends(self, task: int) -> int:
        """The first event from a task on."""
        return bisect_left(self.events, task)

    def _seconds(self, transfer: Transfer) -> float:
        return self._link.seconds(transfer) * self._unit

    def missed(self, parts: Sequence[Part], stalls: np.ndarray, most: int = 8) -> list[Window]:
        """The windows that the parts taken overfill, given the stalls (in units) before each event: worst first."""
        passed = np.array(self._compute) + stalls
        for part in parts:
            for task, seconds in part.extra:
                k = bisect_right(self.events, task)
                if 0 < k < len(self.events):
                    passed[k] += seconds * self._unit
        clock = np.cumsum(passed)
        found: list[tuple[float, Window]] = []
        for direction in DIRECTIONS:
            taken = [t for p in parts for t in p.transfers if t.direction == direction and t.issue != t.due]
            for end in {t.due for t in taken}:
                inside = sorted((t for t in taken if t.due <= end), key=lambda t: -t.issue)
                work = 0.0
                for t in inside:
                    work += self._seconds(t)
                    over = work - float(clock[self._ends(end)] - clock[self._begins(t.issue)])
                    if over > 1e-6:
                        found.append((over, (direction, t.issue, end)))
        return [window for _, window in sorted(found, reverse=True)[:most]]
