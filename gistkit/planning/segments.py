"""Which operators of forward backward runs again, so that only what later ones read of them is kept: pure data.

As few of the first ones as a budget needs run again, in segments as long as fit. A segment ends where it frees the most
for each byte that crosses, as between two blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

Made = TypeVar("Made")
_LEAST = 1 / 3  # of the bytes that a segment may free; one that frees less is too short
_CLOSE = 32  # the bytes kept are found to a 32nd
_GUESSES = 4  # of how many gradients are alive at once, each of the size of a segment's largest tensor


class Operator(NamedTuple):
    """An operator of forward: its result's storage and bytes, or None where that is no tensor; how many bytes of the
    storage plain torch.compile keeps for backward, and how many are kept once all moves are made; the place of the last
    operator that reads it (-1: none does). The bytes kept stand with the first operator of a storage."""

    name: str
    storage: int | None
    size: int
    kept: int
    stays: int
    last: int


class Segment(NamedTuple):
    """Operators of forward, by name, and those whose results are kept, as later ones read them. ``alive_bytes``: of all
    segments up to this one, what is kept once this one ran again; ``largest_bytes``: of its largest tensor."""

    operators: tuple[str, ...]
    saved: tuple[str, ...]
    alive_bytes: int
    largest_bytes: int


def described(segments: Sequence[Segment], operators: Sequence[Operator]) -> str:
    """What runs again, in words."""
    count = sum(len(s.operators) for s in segments)
    return f"{count} of {len(operators)} operators of forward again, in {len(segments)} segments"


class _End(NamedTuple):
    """A place where a segment may end: what later operators read, the bytes of it that are not kept yet, those that the
    segment frees, those that backward keeps of it by itself, and those of its largest tensor."""

    place: int
    alive: tuple[Operator, ...]
    crossing: int
    freed: int
    kept: int
    largest: int

    @property
    def gain(self) -> int:
        return self.freed - self.crossing


def segments(operators: Sequence[Operator], kept_bytes: int, room_bytes: int, gradients: float) -> list[Segment] | None:
    """The segments in order with which at most ``kept_bytes`` are kept, and where ``room_bytes`` are enough for what is
    kept when one ran again and for ``gradients`` of its largest tensor. None where there are none such."""
    found, begun, held, saved = list[Segment](), 0, 0, set[int | None]()
    rest = sum(o.stays for o in operators)
    while held + rest > kept_bytes:
        ends = _ends(operators, begun, room_bytes - held, gradients, saved)
        if not ends:
            return None
        enough, most = held + rest - kept_bytes, max(end.gain for end in ends)
        if most >= enough:
            end = next(end for end in ends if end.gain >= enough)
        else:
            end = max((e for e in ends if e.gain >= _LEAST * most), key=lambda e: e.freed / max(1, e.crossing))
        names = tuple(o.name for o in operators[begun : end.place + 1])
        found.append(Segment(names, tuple(o.name for o in end.alive), held + end.kept, end.largest))
        begun, held, rest = end.place + 1, held + end.crossing, rest - end.freed
        saved |= {o.storage for o in end.alive}
    return found


def _ends(
    operators: Sequence[Operator], begun: int, room: int, gradients: float, saved: set[int | None]
) -> list[_End]:  # fmt: skip
    """Where a segment may end that begins at a place and has so much room in backward."""
    found, kept, freed, largest = list[_End](), 0, 0, 0
    alive = [o for o in operators[:begun] if o.last >= begun]
    for place, made in enumerate(operators[begun:], begun):
        kept, freed, largest = kept + made.kept, freed + made.stays, max(largest, made.size)
        if kept + gradients * largest > room:
            break
        alive = [o for o in (*alive, made) if o.last > place]
        crossing = sum({o.storage: o.size for o in alive if o.storage not in saved}.values())
        if freed > crossing and all(o.storage is not None for o in alive):
            found.append(_End(place, tuple(alive), crossing, freed, kept, largest))
    return found


class Search:
    """The search for as few operators to run again as a budget needs. ``inputs_bytes``: of the budget, what is there
    anyhow. ``peak_bytes``: the least peak that was seen, at first that with nothing run again."""

    def __init__(self, operators: Sequence[Operator], budget_bytes: int, inputs_bytes: int, peak_bytes: int) -> None:
        self.operators, self.budget_bytes, self.inputs_bytes = operators, budget_bytes, inputs_bytes
        self.peak_bytes = self._first_peak = peak_bytes
        self._kept = sum(o.stays for o in operators)

    def fewest(self, made: Callable[[list[Segment]], Made], peak: Callable[[Made], int]) -> Made | None:
        """What is ``made`` with the fewest that fit; None where none do. First no gradient is taken to be alive in a
        segment's backward, then as many as the peaks tell."""
        gradients, peaks = 0.0, dict[tuple[Segment, ...], tuple[Made, int]]()

        def tried(found: list[Segment]) -> tuple[Made, int]:
            if tuple(found) not in peaks:
                candidate = made(found)
                peaks[tuple(found)] = candidate, peak(candidate)
            self.peak_bytes = min(self.peak_bytes, peaks[tuple(found)][1])
            return peaks[tuple(found)]

        for _ in range(_GUESSES):
            best, told = self._with(gradients, tried)
            if best is not None:
                return best
            gradients = max(gradients + 1, told)
        return None

    def _with(
        self, gradients: float, tried: Callable[[list[Segment]], tuple[Made, int]]
    ) -> tuple[Made | None, float]:  # fmt: skip
        """The fewest with so many gradients in each segment; without one, how many the last peak tells of."""
        low, high, kept = 0, self._kept, self._kept - (self._first_peak - self.budget_bytes)
        best, last = None, self._first_peak
        while high - low > max(1, self._kept // _CLOSE):
            kept = kept if low < kept < high else (low + high) // 2
            found = segments(self.operators, kept, self.budget_bytes - self.inputs_bytes, gradients)
            if found is None:
                low = kept
            else:
                candidate, reached = tried(found)
                if reached <= self.budget_bytes:
                    best, low = candidate, kept
                elif reached < last or best is not None:
                    high, last = kept, reached
                else:  # less is kept, and the peak is no lower: it is in a segment's backward
                    beside = ((reached - self.inputs_bytes - s.alive_bytes) / max(1, s.largest_bytes) for s in found)
                    return None, min(beside)
            kept = (low + high) // 2
        return best, gradients
