"""What a source adds for all that starts from it, as joint parts that are never more than the simulator's sum.

A source serves *events*: one rebuild or rerun that starts from it, two one behind the other, two that change what the
other needs. What several events need together is not the sum of what each needs: a storage that is kept for two is kept
until the later of them, what is decoded at a task is decoded once. It is the most that one of them needs, task by task.
So for every task the events are ordered by what they add there, and each further amount is one part, added where any
event that needs as much takes place. That is exact where events add lives, decodings and seconds of their own, as the
union of what they cover is then their maximum, and no more than the truth in any case.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping

from gistkit.planning.policies.optimal.problem import Joint, Key, Part

Event = tuple[Key, ...]
Needed = tuple[frozenset[Event], bool]
"""The events of which any needs an amount; whether the amount is below zero."""


def joints_of(own: tuple[Key, ...], added: Mapping[Event, Part]) -> list[Joint]:
    """The joint parts of ``own`` moves; ``added``: what each event alone adds with them, transfers apart."""
    memory: dict[Needed, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for first, end, amounts in _spans(added):
        for needed, nbytes in _layers(amounts):
            memory[needed][first] += int(nbytes)
            memory[needed][end] -= int(nbytes)
    extra: dict[Needed, list[tuple[int, float]]] = defaultdict(list)
    by_task: dict[int, dict[Event, float]] = defaultdict(dict)
    for event, part in added.items():
        for task, seconds in part.extra:
            by_task[task][event] = seconds
    for task in sorted(by_task):
        for needed, seconds in _layers(by_task[task]):
            extra[needed].append((task, seconds))
    found = []
    for needed in dict.fromkeys((*memory, *extra)):
        part = Part(levels(memory.get(needed, {})), tuple(extra.get(needed, ())))
        events = tuple(sorted(needed[0]))
        if part != Part():
            found.append(Joint((*events[0], *own), part) if len(events) == 1 else Joint(own, part, events))
    return found


def _spans(added: Mapping[Event, Part]) -> Iterator[tuple[int, int, dict[Event, int]]]:
    """(first task, task behind the last, bytes by event) of the spans in which no event's bytes change."""
    ends = sorted({t for part in added.values() for first, last, _ in part.memory for t in (first, last + 1)})
    amounts: list[dict[Event, int]] = [{} for _ in ends]
    for event, part in added.items():
        for first, last, nbytes in part.memory:
            for at in range(bisect_left(ends, first), bisect_left(ends, last + 1)):
                amounts[at][event] = nbytes
    for at in range(len(ends) - 1):
        yield ends[at], ends[at + 1], amounts[at]


def _layers(amounts: Mapping[Event, float]) -> Iterator[tuple[Needed, float]]:
    """The amounts of one task as sums: each further one with the events that add so much at least. Seconds that differ
    by rounding are one amount."""
    for below in (False, True):
        left = {e: abs(n) for e, n in amounts.items() if n and (n < 0) == below}
        before = 0.0
        while left:
            least = min(left.values())
            yield (frozenset(left), below), (before - least if below else least - before)
            left = {e: n for e, n in left.items() if n > least * (1 + 1e-12)}
            before = least


def levels(steps: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """(first, last, bytes) of the runs in which a sum of steps, by task, is not zero."""
    found, level, before = [], 0, 0
    for task in sorted(steps):
        if steps[task] == 0:
            continue
        if level:
            found.append((before, task - 1, level))
        level, before = level + steps[task], task
    return tuple(found)
