"""Which operators of forward backward runs again, so that only what later ones read of them is kept: pure data.

The first ones run again, as many as a budget needs, in segments. A segment ends where it frees the most bytes for the
time of running it again, as between two blocks; where that is not enough, for the bytes that cross."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

Made = TypeVar("Made")
_LEAST = {True: 1 / 16, False: 1 / 3}  # of the most bytes gained at any end, chosen by time or else; less is too short
_CLOSE = 32  # the bytes kept are found to a 32nd
_GUESSES, _STEP = 6, 0.5  # of how many gradients are alive at once, each of the size of a segment's largest tensor


class Operator(NamedTuple):
    """An operator of forward: its result's storage and bytes, or None where that is no tensor; how many bytes of the
    storage plain torch.compile keeps for backward, and how many are kept once all moves are made; the place of the last
    operator that reads it (-1: none does); the places of those that it reads, and its time. The bytes kept stand with
    the first operator of a storage. What cannot run again and is kept has a place behind all as its last."""

    name: str
    storage: int | None
    size: int
    kept: int
    stays: int
    last: int
    reads: tuple[int, ...] = ()
    time_s: float = 0.0


class Segment(NamedTuple):
    """Operators of forward, by name, and those whose results are kept, as later ones read them. ``alive_bytes``: of all
    segments up to this one, what is kept once this one ran again; ``largest_bytes``: of its largest tensor;
    ``time_s``: of those that run again."""

    operators: tuple[str, ...]
    saved: tuple[str, ...]
    alive_bytes: int
    largest_bytes: int
    time_s: float


def described(segments: Sequence[Segment], operators: Sequence[Operator]) -> str:
    """What runs again, in words."""
    count = sum(len(s.operators) for s in segments)
    return f"{count} of {len(operators)} operators of forward again, in {len(segments)} segments"


class _End(NamedTuple):
    """A place where a segment may end: what later operators read, the bytes of it that are not kept yet, those that the
    segment frees, those that backward keeps of it by itself, and those of its largest tensor. ``time_s``: of what
    backward runs again."""

    place: int
    alive: tuple[Operator, ...]
    crossing: int
    freed: int
    kept: int
    largest: int
    time_s: float

    @property
    def gain(self) -> int:
        return self.freed - self.crossing


def segments(
    operators: Sequence[Operator], kept_bytes: int, room_bytes: int, gradients: float, by_time: bool = True
) -> list[Segment] | None:  # fmt: skip
    """The segments in order with which at most ``kept_bytes`` are kept, and where ``room_bytes`` are enough for what is
    kept when one ran again and for ``gradients`` of its largest tensor. None where there are none such. ``by_time``: a
    segment ends where it gains most for its time, not for what crosses."""
    found, begun, held, saved = list[Segment](), 0, 0, set[int | None]()
    rest = sum(o.stays for o in operators)
    while held + rest > kept_bytes:
        ends = _ends(operators, begun, room_bytes - held, gradients, saved)
        if not ends:
            return None
        enough, most = held + rest - kept_bytes, max(end.gain for end in ends)
        long = [end for end in ends if end.gain >= _LEAST[by_time] * most]
        end = max(long, key=lambda e: e.gain / max(1e-9, e.time_s) if by_time else e.freed / max(1, e.crossing))
        if end.gain >= enough:
            end = min((e for e in ends if e.gain >= enough), key=lambda e: (e.time_s, e.place))
        names = tuple(o.name for o in operators[begun : end.place + 1])
        found.append(Segment(names, tuple(o.name for o in end.alive), held + end.kept, end.largest, end.time_s))
        begun, held, rest = end.place + 1, held + end.crossing, rest - end.freed
        saved |= {o.storage for o in end.alive}
    return found


def _ends(
    operators: Sequence[Operator], begun: int, room: int, gradients: float, saved: set[int | None]
) -> list[_End]:  # fmt: skip
    """Where a segment may end that begins at a place and has so much room in backward: where fewer bytes cross
    than before, and the next operator adds to them."""
    found, kept, freed, largest, before = list[_End](), 0, 0, 0, 0
    alive, last, fell = [o for o in operators[:begun] if o.last >= begun], None, False
    for place, made in enumerate(operators[begun:], begun):
        kept, freed, largest = kept + made.kept, freed + made.stays, max(largest, made.size)
        alive = [o for o in (*alive, made) if o.last > place]
        crossing = sum({o.storage: o.size for o in alive if o.storage not in saved}.values())
        room_left = kept + gradients * largest <= room
        if last is not None and (crossing > before or not room_left):
            time_s = _time_s(operators, begun, last.place, saved | {o.storage for o in last.alive})
            found.append(last._replace(time_s=time_s))
        if not room_left:
            break
        if any(o.storage is None for o in alive):
            continue
        fell = crossing < before or (fell and crossing == before)
        last = last if fell and crossing == before else None
        if fell and freed > crossing:
            last = _End(place, tuple(alive), crossing, freed, kept, largest, 0.0)
        before = crossing
    return found


def _time_s(operators: Sequence[Operator], begun: int, last: int, saved: set[int | None]) -> float:
    """The time of a segment's operators that run again: what is kept of it, but for what is saved, and what that is
    made of."""
    places = [i for i in range(begun, last + 1) if operators[i].kept and operators[i].storage not in saved]
    seen, time_s = set(places), 0.0
    while places:
        made = operators[places.pop()]
        time_s += made.time_s
        more = {i for i in made.reads if i >= begun and operators[i].storage not in saved} - seen
        seen |= more
        places += more
    return time_s


class Search:
    """The search for as few operators to run again as a budget needs. ``inputs_bytes``: of the budget, what is there
    anyhow. ``peak_bytes``: the least peak that was seen, at first that with nothing run again."""

    def __init__(self, operators: Sequence[Operator], budget_bytes: int, inputs_bytes: int, peak_bytes: int) -> None:
        self.operators, self.budget_bytes, self.inputs_bytes = operators, budget_bytes, inputs_bytes
        self.peak_bytes = self._first_peak = peak_bytes
        self._kept, self._stuck = sum(o.stays for o in operators), set[int]()

    def fewest(self, made: Callable[[list[Segment]], Made], peak: Callable[[Made], int]) -> Made | None:
        """What is ``made`` with the fewest that fit; None where none do. First no gradient is taken to be alive in a
        segment's backward, then as many as the peaks tell."""
        peaks = dict[tuple[Segment, ...], tuple[Made, int]]()

        def tried(found: list[Segment]) -> tuple[Made, int]:
            if tuple(found) not in peaks:
                candidate = made(found)
                peaks[tuple(found)] = candidate, peak(candidate)
            self.peak_bytes = min(self.peak_bytes, peaks[tuple(found)][1])
            return peaks[tuple(found)]

        gradients = 0.0
        for _ in range(_GUESSES):
            more = gradients + _STEP
            for by_time in (True, False):
                best, told = self._with(gradients, by_time, tried)
                if best is not None:
                    return best
                more = max(more, told)
            gradients = more
        return None

    def _with(
        self, gradients: float, by_time: bool, tried: Callable[[list[Segment]], tuple[Made, int]]
    ) -> tuple[Made | None, float]:  # fmt: skip
        """The fewest with so many gradients in each segment; without one, how many the peak tells of."""
        low, high, kept = 0, self._kept, self._kept - (self._first_peak - self.budget_bytes)
        best, last = None, self._first_peak
        while high - low > max(1, self._kept // _CLOSE):
            kept = kept if low < kept < high else (low + high) // 2
            found = segments(self.operators, kept, self.budget_bytes - self.inputs_bytes, gradients, by_time)
            if found is None:
                low = kept
            else:
                candidate, reached = tried(found)
                if reached <= self.budget_bytes:
                    best, low = candidate, kept
                elif best is not None or (reached < last and reached not in self._stuck):
                    high, last = kept, reached
                else:  # less is kept, and the peak is no lower: it is in a segment's backward
                    self._stuck.add(reached)
                    beside = ((reached - self.inputs_bytes - s.alive_bytes) / max(1, s.largest_bytes) for s in found)
                    return None, min(beside)
            kept = (low + high) // 2
        return best, gradients
