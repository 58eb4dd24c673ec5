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

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import cast

from gistkit.planning.simulate import Runs

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


@dataclass(frozen=True)
class Leaving:
    """What it takes that blocks leave now: who has a copy in host memory (``saved``), the seconds of a transfer, when
    each block was written, when the stream is free, the present moment."""

    saved: Collection[int]
    transfer_s: Callable[[int], float]
    ready_s: Mapping[int, float]
    link_free_s: float
    now_s: float

    def delay_s(self, blocks: Iterable[int]) -> float:
        """Fig. 3 for blocks that leave together."""
        saved, ready = self.saved, self.ready_s
        transfers = [(ready.get(b, 0.0), self.transfer_s(b)) for b in blocks if b not in saved]
        return offload_delay_s(transfers, self.link_free_s, self.now_s)

    def least_s(self, runs: Runs) -> list[float]:
        """By run what its delay is at least, whatever the rounding: its transfers one after the other as soon as the
        stream is free. Sums of up to 10^6 doubles are off by less than 10^-9 of what is summed up."""
        each = [0.0 if b in self.saved else self.transfer_s(b) for b in cast("Sequence[int]", runs.blocks)]
        late_s = self.link_free_s - self.now_s - 1e-9 * (self.link_free_s + sum(each))
        return [late_s + seconds if seconds else 0.0 for seconds in runs.sums(each)]


def best_scheme(
    runs: Runs, leaving: Leaving | None, need: Callable[[int], int], unsaved_bytes: Callable[[int], int]
) -> Scheme | None:
    """The run (Fig. 4) with the least delay, of equals the one that is needed last, then the one that moves the fewest
    bytes, then the first; None: no run.

    ``leaving`` None: nothing delays. ``need``: the task that needs a block next. ``unsaved_bytes``: what has to cross
    the link when a block leaves.
    """
    if not runs.spans:
        return None
    blocks = cast("Sequence[int]", runs.blocks)
    delay_s, equal = (0.0, runs) if leaving is None else _least_delayed(runs, leaving)
    best = 0
    if len(equal.spans) > 1:
        # -1: a run of no blocks is needed by nobody, and moves nothing.
        needed = equal.least([need(b) for b in blocks], none=-1)
        moved = equal.sums([unsaved_bytes(b) for b in blocks])
        best = min(range(len(moved)), key=lambda i: (-needed[i], moved[i]))
    first, end = equal.spans[best]
    return Scheme(tuple(blocks[first:end]), delay_s)


def _least_delayed(runs: Runs, leaving: Leaving) -> tuple[float, Runs]:
    """The least delay of a run, and all runs of that delay. Few are looked at closely: a sum rules out the others."""
    bounds = leaving.least_s(runs)
    blocks = cast("Sequence[int]", runs.blocks)
    least, equal = inf, []
    for at in sorted(range(len(bounds)), key=bounds.__getitem__):
        if bounds[at] > least:
            break
        first, end = runs.spans[at]
        delay = leaving.delay_s(blocks[first:end])
        if delay < least:
            least, equal = delay, [at]
        elif delay == least:
            equal.append(at)
    return least, Runs(blocks, [runs.spans[at] for at in sorted(equal)])
