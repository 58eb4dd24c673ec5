"""New moments to leave and to come back for what a choice ships: those at which the link really has time.

The options know the link as if it were free. A simulated choice says when its queues are: a storage may leave the
device as soon as its transfer has ended behind those before it, and has to be fetched early enough for those after it.
These moments are offered beside the old ones, and the program is solved anew (column generation, with the simulator in
the place of the pricing problem).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from gistkit.ir import Decision
from gistkit.planning.policies.optimal.problem import Link
from gistkit.planning.simulate import Transfer


def retimed(
    decisions: Sequence[Decision], transfers: Sequence[Transfer], start_s: Sequence[float], link: Link
) -> dict[int, tuple[Decision, ...]]:
    """By storage the decisions on the host at other moments: left when the link is done, fetched when it must, both.

    ``transfers`` are those of the step in the order of issue, ``start_s`` the seconds at which its tasks begin.
    """
    left, fetched = _left(transfers, start_s, link), _fetched(transfers, start_s, link)
    found: dict[int, tuple[Decision, ...]] = {}
    for d in decisions:
        if d.place == "host" and d.storage in left and d.storage in fetched:
            release, prefetch = left[d.storage], fetched[d.storage]
            points = ((release, prefetch), (release, d.prefetch), (d.release, prefetch))
            new = [replace(d, release=r, prefetch=p) for r, p in dict.fromkeys(points) if r <= p]
            found[d.storage] = tuple(n for n in new if n != d)
    return found


def _left(transfers: Sequence[Transfer], start_s: Sequence[float], link: Link) -> dict[int, int]:
    """The first task that begins when a storage's transfer to the host has ended, one after the other."""
    found, free = {}, 0.0
    for t in transfers:
        if t.direction == "d2h":
            free = max(free, start_s[min(t.issue, len(start_s) - 1)]) + link.seconds(t)
            found[t.storage] = max(bisect_left(start_s, free), t.issue + 1)
    return found


def _fetched(transfers: Sequence[Transfer], start_s: Sequence[float], link: Link) -> dict[int, int]:
    """The last task from whose start on a storage's transfer is in time, and those due after it as well."""
    found, latest = {}, float("inf")
    for t in sorted((t for t in transfers if t.direction == "h2d"), key=lambda t: (-t.due, -t.issue)):
        latest = min(latest, start_s[t.due]) - link.seconds(t)
        found[t.storage] = max(0, min(bisect_right(start_s, latest) - 1, t.due))
    return found
