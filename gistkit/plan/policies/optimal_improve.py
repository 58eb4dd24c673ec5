"""A faster choice from one that fits: single steps, first by the problem's own seconds, then by the simulator's, then
steps for which others make room."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from gistkit.plan.policies.optimal_problem import Part
from gistkit.plan.policies.optimal_search import LINK_WEIGHTS, Search

TURNS = 4
Choice = tuple[tuple[int, ...], float]
"""A choice and its simulated seconds."""


def improve(search: Search, taken: Sequence[int], seconds: float, budget_bytes: int | None, deadline: float) -> Choice:
    """A choice at least as fast as ``taken`` (which takes ``seconds``) that fits, until nothing helps or time is up."""
    limit = np.iinfo(np.int64).max if budget_bytes is None else budget_bytes
    best: Choice = (tuple(taken), seconds)
    while time.monotonic() < deadline:
        before = best[1]
        best = _swift(search, best, limit, deadline)
        best = _simulated(search, best, limit, deadline)
        best = _exchanged(search, best, limit, deadline)
        if best[1] >= before:
            break
    return best


def _swift(search: Search, best: Choice, limit_bytes: int, deadline: float) -> Choice:
    """Steps without transfers, whose seconds and bytes are sums: the simulator is asked once, at the end. Where it
    finds more bytes than the problem knows of (scratches on CUDA), once more with so many fewer."""
    room = limit_bytes
    for _ in range(TURNS):
        trial = _summed(search, best[0], room, deadline)
        if trial == best[0]:
            break
        took, peak = search.clock(trial)
        if peak <= limit_bytes:
            return (trial, took) if took < best[1] else best
        room = int(search.bytes_by_task(trial).max(initial=0)) - (peak - limit_bytes)
    return best


def _summed(search: Search, taken: Sequence[int], limit_bytes: int, deadline: float) -> tuple[int, ...]:
    now = list(taken)
    level = search.bytes_by_task(now)
    found = True
    while found and time.monotonic() < deadline:
        found = False
        for index in _promising(search, now):
            if time.monotonic() > deadline:
                break
            changes = search.steps.changes(now, *search.keys[index])
            if changes is None:
                continue
            trial = search.steps.changed(now, changes)
            old, new = list(search.touching(now, changes)), list(search.touching(trial, changes))
            if any(p.transfers for p in (*old, *new)) or _seconds(new) >= _seconds(old) - 1e-12:
                continue
            changed = level + search.difference(now, trial, changes)
            if changed.max(initial=0) <= limit_bytes:
                now, level, found = trial, changed, True
    return tuple(now)


def _seconds(parts: Iterable[Part]) -> float:
    return sum(p.seconds for p in parts)


def _simulated(search: Search, best: Choice, limit_bytes: int, deadline: float) -> Choice:
    now, seconds = list(best[0]), best[1]
    level, compute_s = search.bytes_by_task(now), search.compute_s(now)
    found = True
    while found and time.monotonic() < deadline:
        found = False
        for index in _promising(search, now):
            if time.monotonic() > deadline:
                break
            changes = search.steps.changes(now, *search.keys[index])
            if changes is None:
                continue
            trial = search.steps.changed(now, changes)
            more_s = _seconds(search.touching(trial, changes)) - _seconds(search.touching(now, changes))
            if compute_s + more_s >= seconds:
                continue  # slower even if it did not stall at all
            changed = level + search.difference(now, trial, changes)
            if changed.max(initial=0) > limit_bytes:
                continue
            took, peak = search.clock(trial)
            if took < seconds * (1 - 1e-12) and peak <= limit_bytes:
                now, seconds, level, found = trial, took, changed, True
                compute_s += more_s
    return tuple(now), seconds


def _exchanged(search: Search, best: Choice, limit_bytes: int, deadline: float) -> Choice:
    """Steps that are faster and do not fit, with what they need repaired elsewhere."""
    now, seconds = best
    for index in _promising(search, now):
        if time.monotonic() > deadline:
            break
        changes = search.steps.changes(now, *search.keys[index])
        if changes is None:
            continue
        for weight in LINK_WEIGHTS:
            begun = search.steps.changed(now, changes)
            trial = search.repair(begun, limit_bytes, deadline, weight, changes)
            if trial is None:
                break
            took, peak = search.clock(trial)
            if took < seconds * (1 - 1e-12) and peak <= limit_bytes:
                now, seconds = trial, took
                break
    return now, seconds


def _promising(search: Search, now: Sequence[int]) -> list[int]:
    """Moves that may be faster than those taken: of less compute, or over the link at another time."""
    found = []
    for group, moves in enumerate(search.problem.groups):
        mine = moves[now[group]].part
        waits = bool(mine.transfers)
        for move, other in enumerate(moves):
            gain = mine.seconds - other.part.seconds
            if move != now[group] and (gain > 0 or waits):
                found.append((gain, int(search.offsets[group]) + move))
    tied = set(search.steps.tied.tolist())
    return [index for _, index in sorted(found, reverse=True) if index not in tied]
