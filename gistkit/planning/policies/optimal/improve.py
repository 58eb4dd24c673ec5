"""A faster choice from one that fits: single steps until none helps, then kicks out of where that got stuck.

A kick takes a few steps that the budget has no room for, or that cost something, and has the rest repaired at prices
that are drawn anew each time; then single steps again (iterated local search; Lourenço, Martin and Stützle, 2003). All
of it looks at sums (:mod:`.optimal_standing`); the simulator is asked for what they end in, and step by step only where
it finds more bytes than the sums know of (scratches on CUDA).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from gistkit.planning.policies.optimal.search import Search
from gistkit.planning.policies.optimal.standing import Standing

LESS = 1 - 1e-12
"""A step has to be faster by more than rounding."""
MOST_KICKED = 4
"""Steps of one kick, at most."""
DIRECTED = 0.7
"""Share of the kicks that begin with a step of less compute."""
LINK_RANGE = (0.01, 1.0)
"""What a second of transfer counts for beside one of compute while a kick is repaired: drawn between these."""
NOISE = 0.5
"""Spread of the logarithms of the prices that a kick is repaired at."""
LOOKED_AT, MOST_LOOKED_AT = 0.15, 60
"""Share of the groups, beside those that a kick changed, whose moves are tried behind it; about how many at most."""
PATIENCE = 200
"""Kicks in a row without success, after which the search ends."""
Choice = tuple[tuple[int, ...], float]
"""A choice and its simulated seconds."""


def improve(search: Search, starts: Sequence[Choice], budget_bytes: int | None, deadline: float) -> Choice:
    """A choice at least as fast as any of ``starts`` (which fit, the fastest first), until little helps or time is
    up."""
    limit = int(np.iinfo(np.int64).max) if budget_bytes is None else budget_bytes
    best = starts[0]
    for start in starts:
        found = _descended(search, start, limit, deadline)
        best = found if found[1] < best[1] else best
    vain = 0
    while vain < PATIENCE and time.monotonic() < deadline:
        found = _kicked(search, best, limit, deadline)
        vain += 1
        if found[1] < best[1] * LESS:
            best, vain = _descended(search, found, limit, deadline), 0
    return best


def _descended(search: Search, best: Choice, limit_bytes: int, deadline: float) -> Choice:
    """Single steps, the simulator asked at the end; where it disagrees, anew and asked every time."""
    for every in (False, True):
        now = search.standing(best[0])
        seconds = _descend(search, now, best[1] if every else now.seconds(), limit_bytes, deadline, every=every)
        if tuple(now.taken) == best[0]:
            return best
        took, peak = (seconds, limit_bytes) if every else search.clock(now.taken)
        if peak <= limit_bytes:
            return (tuple(now.taken), took) if took < best[1] else best
    return best


def _descend(
    search: Search,
    now: Standing,
    seconds: float,
    limit_bytes: int,
    deadline: float,
    *,
    every: bool = False,
    groups: np.ndarray | None = None,
) -> float:
    """Take single steps until none is faster; the seconds then. ``every``: the simulator is asked for each. ``groups``:
    which ones may change (None: all)."""
    going = True
    while going and time.monotonic() < deadline:
        going = False
        for index in _promising(search, now.taken, deadline, groups):
            step = now.step(*search.keys[index])
            if step is None or now.compute_s + step.more_s >= seconds:
                continue  # slower even if it did not stall at all
            level = now.level_after(step)
            if int(level.max(initial=0)) > limit_bytes:
                continue
            took = now.seconds_after(step, seconds)
            if every and took < seconds * LESS:
                took, peak = search.clock(search.steps.changed(now.taken, step.changes))
                if peak > limit_bytes:
                    continue
            if took < seconds * LESS:
                now.take(step, level)
                seconds, going = took, True
    return seconds


def _promising(search: Search, now: Sequence[int], deadline: float, groups: np.ndarray | None) -> Iterator[int]:
    """Moves that may be faster than those taken, most gain first: of less compute, or over the link at another time."""
    current = search.offsets[:-1] + np.array(now, dtype=np.int64)
    gain, sizes = _gains(search, now), np.diff(search.offsets)
    able = (gain > 0) | np.repeat(search.link_s[current] > 0, sizes)
    able[current] = able[search.steps.tied] = False
    if groups is not None:
        able &= np.repeat(groups, sizes)
    found = np.flatnonzero(able)
    for index in found[np.argsort(-gain[found], kind="stable")].tolist():
        if time.monotonic() > deadline:
            return
        yield index


def _drawn(search: Search, now: Sequence[int]) -> list[int]:
    """The moves of a kick: mostly one that computes for less than what is taken, by how much less, and any others."""
    draw, gain = search.draw, _gains(search, now)
    found = draw.choices(range(len(gain)), k=draw.randint(1, MOST_KICKED))
    better = np.flatnonzero(gain > 0)
    if len(better) and draw.random() < DIRECTED:
        found[0] = draw.choices(better.tolist(), gain[better].tolist())[0]
    return found


def _gains(search: Search, now: Sequence[int]) -> np.ndarray:
    """By move, the seconds of compute that the one taken of its group needs more."""
    current = search.offsets[:-1] + np.array(now, dtype=np.int64)
    gain = np.repeat(search.compute_s[current], np.diff(search.offsets)) - search.compute_s
    gain[search.steps.tied] = 0.0  # taken with their segments only
    return gain


def _kicked(search: Search, best: Choice, limit_bytes: int, deadline: float) -> Choice:
    """A few steps at random, repaired and improved; ``best`` where that is no faster."""
    now, draw = search.standing(best[0]), search.draw
    moved: set[int] = set()
    for index in _drawn(search, now.taken):
        step = now.step(*search.keys[index])
        if step is not None and moved.isdisjoint(step.changes):
            moved.update(step.changes)
            now.take(step)
    low, high = np.log(LINK_RANGE)
    noise = np.random.default_rng(draw.getrandbits(32))
    prices = search.cost_s(float(np.exp(draw.uniform(low, high))))
    prices = prices * np.exp(noise.normal(0.0, NOISE, len(prices)))
    room = limit_bytes
    for _ in range(2):
        if not moved or not search.mend(now, room, deadline, prices, moved):
            return best
        share = min(LOOKED_AT, MOST_LOOKED_AT / len(now.taken))
        groups = (np.array(now.taken) != best[0]) | (noise.random(len(now.taken)) < share)
        seconds = _descend(search, now, now.seconds(), room, deadline, groups=groups)
        if seconds >= best[1] * LESS:
            return best
        took, peak = search.clock(now.taken)
        if peak <= limit_bytes:
            return (tuple(now.taken), took) if took < best[1] * LESS else best
        room = int(now.level.max()) - (peak - limit_bytes)  # scratches that the sums do not know
    return best
