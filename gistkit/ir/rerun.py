"""What runs anew when storages come back by a rerun of the forward, as a checkpoint does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rerun:
    """``calls`` run anew, in the order of the forward, and make ``inside``; they start from ``needs``."""

    calls: tuple[int, ...]
    inside: frozenset[int]
    needs: frozenset[int]


def rerun_of(
    wanted: Iterable[int],
    writers: Mapping[int, Sequence[int]],
    reads: Callable[[int], Iterable[int]],
    stays: Callable[[int], bool],
) -> Rerun:
    """The rerun that brings the ``wanted`` storages back. ``writers`` are the calls that write to a storage, ``reads``
    gives the storages that a call reads, ``stays`` whether one is there in backward without the rerun.

    Storages and calls are numbers; the blocks and tasks of a step are as good.
    """
    inside, needs, calls = set(wanted), set(), set()
    work = list(inside)
    while work:
        for call in writers.get(work.pop(), ()):
            if call in calls:
                continue
            calls.add(call)
            for read in reads(call):
                if read in inside or read in needs:
                    continue
                if stays(read):
                    needs.add(read)
                else:
                    inside.add(read)
                    work.append(read)
    return Rerun(tuple(sorted(calls)), frozenset(inside), frozenset(needs))
