"""Which operators run again, as data."""

import pytest

from gistkit.planning.segments import Operator, Search, described, segments


def blocks(count, start=0):
    """Blocks of nine operators whose results are kept until the tenth, which is all that the next block reads."""
    found = []
    for first in range(start, start + 10 * count, 10):
        found += [Operator(f"inner {first + i}", first + i, 1, 1, 1, first + 9) for i in range(9)]
        found.append(Operator(f"block {first}", first + 9, 1, 0, 0, first + 18))
    return found


def saved(found):
    return [name for segment in found for name in segment.saved]


@pytest.mark.parametrize(
    ("kept", "room", "ends"),
    [
        (36, 99, []),
        (35, 99, ["block 0"]),
        (28, 99, ["block 0"]),
        (20, 99, ["block 10"]),
        (20, 10, ["block 0", "block 10"]),  # a segment of two blocks would have 18 bytes alive
        (12, 99, ["block 20"]),
    ],
)
def test_as_few_operators_run_again_as_the_bytes_kept_need_in_segments_as_long_as_there_is_room(kept, room, ends):
    operators = [*blocks(4), Operator("end", 99, 1, 0, 0, -1)]
    found = segments(operators, kept, room, 0)
    names = [name for segment in found for name in segment.operators]
    assert names == [o.name for o in operators[: len(names)]]
    assert saved(found) == ends
    left = sum(o.stays for o in operators[len(names) :])
    assert left + len(ends) <= kept


def test_room_is_left_for_gradients():
    operators = blocks(4)
    assert saved(segments(operators, 20, 18, 0)) == ["block 10"]
    assert saved(segments(operators, 20, 18, 5)) == ["block 0", "block 10"]
    assert segments(operators, 20, 18, 15) is None


def test_what_moves_free_without_running_again_is_no_gain():
    operators = [o._replace(stays=0) if o.name.startswith("inner 1") else o for o in blocks(2)]
    assert segments(operators, 9, 99, 0) == []
    assert saved(segments(operators, 1, 99, 0)) == ["block 0"]


def test_no_segment_ends_where_something_crosses_that_is_no_tensor():
    pair = [Operator("pair", None, 0, 0, 0, 25), *blocks(2), Operator("end", 99, 1, 1, 1, -1)]
    assert segments(pair, 12, 99, 0) is None


def test_what_was_kept_for_an_earlier_segment_crosses_a_later_end_for_nothing():
    skip = Operator("skip", 0, 4, 0, 0, 41)
    found = segments([skip, *blocks(4, 1), Operator("end", 99, 1, 0, 0, -1)], 16, 15, 0)
    assert [segment.saved for segment in found] == [("skip", "block 1"), ("skip", "block 11"), ("skip", "block 21")]
    assert [segment.alive_bytes for segment in found] == [9, 4 + 1 + 9, 4 + 2 + 9]


class Peaks:
    """A peak for segments: what is kept, or what is alive in one's backward with ``gradients`` of its largest."""

    def __init__(self, operators, gradients):
        self.operators, self.gradients, self.made = operators, gradients, []

    def __call__(self, found):
        self.made.append(found)
        again = {name for segment in found for name in segment.operators}
        kept = sum(o.stays for o in self.operators if o.name not in again) + len(saved(found))
        return max(kept, *(s.alive_bytes + self.gradients * s.largest_bytes for s in found))


@pytest.mark.parametrize(
    ("budget", "gradients", "again", "tries"), [(60, 0, 40, 4), (60, 30, 40, 8), (30, 0, 80, 6), (30, 12, 80, 8)]
)
def test_a_search_finds_the_fewest_that_fit(budget, gradients, again, tries):
    operators = [*blocks(10), Operator("end", 999, 1, 0, 0, -1)]
    peaks = Peaks(operators, gradients)
    search = Search(operators, budget, 0, 90)
    assert search.fewest(lambda found: (found, peaks(found)), lambda made: made[1])[1] <= budget
    found = peaks.made[-1]
    assert sum(len(segment.operators) for segment in found) <= again
    assert len(peaks.made) <= tries
    assert described(found, operators).startswith(f"{sum(len(s.operators) for s in found)} of 101 operators")


def test_a_search_tells_the_least_peak_that_was_seen():
    operators = blocks(10)
    peaks = Peaks(operators, 50)
    search = Search(operators, 20, 0, 90)
    assert search.fewest(lambda found: (found, peaks(found)), lambda made: made[1]) is None
    assert search.peak_bytes == min([90, *(max(map(peaks, [found])) for found in list(peaks.made))])
