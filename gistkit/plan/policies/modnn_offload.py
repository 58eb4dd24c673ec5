"""moDNN's search for what to offload (DATE 2018, section IV-B1, Fig. 3 and 4).

A failed allocation needs contiguous space: every segment of the memory map may be the first of a run of free segments
and of blocks that may leave; segments at subsequent addresses are added until the run is large enough. Of all runs the
one is taken that delays the next task least. A block whose bytes are in host memory already is let go of without a
transfer.

Delay (Fig. 3): transfers run one after the other on their own stream, beside the computation. The schedule is made
before anything runs, so a transfer starts as soon as the block was written and the stream is free, both of which may be
in the past by now; only what of it lies after the present moment delays the next task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

Run = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """Blocks at neighbouring addresses that leave together, and by how much that delays the next task."""

    blocks: Run
    delay_s: float


def transfers_end_s(transfers: Iterable[tuple[float, float]], link_free_s: float) -> float:
    """When (ready, seconds) transfers are over that run one after the other, each not before it is ready."""
    end = link_free_s
    for ready, seconds in sorted(transfers):
        end = max(end, ready) + seconds
    return end


def offload_delay_s(transfers: Iterable[tuple[float, float]], link_free_s: float, now_s: float) -> float:
    """Fig. 3's delay of the task that would start now: what the (ready, seconds) transfers reach beyond that; 0.0 where
    there are none."""
    listed = list(transfers)
    return max(0.0, transfers_end_s(listed, link_free_s) - now_s) if listed else 0.0


def best_scheme(
    runs: Iterable[Run],
    delay_s: Callable[[Run], float],
    regret: Callable[[Run], tuple[int, ...]],
    least_s: Callable[[Run], float] | None = None,
) -> Scheme | None:
    """The run with the least delay, of equals the one with the least ``regret``, then the first; None: no run.

    ``runs`` are those of :meth:`gistkit.plan.memory_map.MemoryMap.runs`: one for each first segment (Fig. 4).
    ``least_s``, sooner computed, is never above ``delay_s``: what it puts above the least delay is not looked at.
    """
    least, equal = inf, []
    for run in runs:
        if least_s is not None and least_s(run) > least:
            continue
        delay = delay_s(run)
        if delay < least:
            least, equal = delay, [run]
        elif delay == least:
            equal.append(run)
    return Scheme(min(equal, key=regret), least) if equal else None
