"""Cuts of a forward into segments, as data."""

import random

import pytest

from gistkit.planning.segments import Operator, Segment, divided, fewest, segments


def blocks(count, start=0):
    """Blocks of nine operators whose results are kept until the tenth, which is all that the next block reads."""
    found = []
    for first in range(start, start + 10 * count, 10):
        found += [Operator(f"inner {first + i}", first + i, 1, 1, 1, first + 9) for i in range(9)]
        found.append(Operator(f"block {first}", first + 9, 1, 0, 0, first + 18))
    return found


@pytest.mark.parametrize(("factor", "saved"), [(9, ["block 0", "block 10", "block 20"]), (18, ["block 10"]), (30, [])])
def test_a_forward_is_cut_where_little_crosses(factor, saved):
    operators = blocks(3)
    found = segments([*operators, Operator("end", 99, 18, 18, 18, -1)], factor)
    assert [name for segment in found for name in segment.saved] == saved
    names = [name for segment in found for name in segment.operators]
    assert names == [o.name for o in operators[: len(names)]]


@pytest.mark.parametrize(("size", "saved"), [(9, ["block 0", "block 10", "block 20"]), (8, ["block 0", "block 10"])])
def test_backward_does_not_begin_with_a_segment_of_which_more_is_kept_than_behind_it(size, saved):
    found = segments([*blocks(3), Operator("end", 99, size, size, size, -1)], 9)
    assert [name for segment in found for name in segment.saved] == saved


def test_what_an_earlier_cut_keeps_crosses_a_later_one_for_nothing():
    skip = Operator("skip", 0, 1, 0, 0, 31)
    found = segments([skip, *blocks(3, 1), Operator("end", 99, 9, 9, 9, -1)], 9)
    assert [segment.saved for segment in found] == [("skip", "block 11"), ("skip", "block 21")]
    assert found[0].operators[0] == "skip"


def test_no_cut_is_made_where_something_crosses_that_is_no_tensor():
    pair = [Operator("pair", None, 0, 0, 0, 25), *blocks(2), Operator("end", 99, 1, 1, 1, -1)]
    assert segments(pair, 9) == []


def blocks_of(count, size, time_s):
    return [Segment((f"operator {i}",), (), size, time_s) for i in range(count)]


@pytest.mark.parametrize(("budget", "count"), [(99, 1), (95, 5), (92, 8), (90, 8)])
def test_as_few_segments_as_fit(budget, count):
    tried = []

    def made(parts):
        tried.append(len(parts))
        return 100 - len(parts)

    found = fewest([blocks_of(8, 1, 1.0)], made, int, budget, 100)
    assert (found.made, found.peak_bytes, found.count) == (100 - count, 100 - count, count)
    assert len(tried) <= 4
    assert fewest([], made, int, budget, 100) is None and fewest([blocks_of(8, 1, 1.0)], made, int, 100, 100) is None


@pytest.mark.parametrize(("budget", "size"), [(95, 1), (88, 2)])
def test_the_division_is_taken_that_needs_least_time(budget, size):
    """Segments of 2 bytes take 3 s each, twelve bytes in all, and those of 1 byte take 1 s each, ten in all."""
    parts = {1: blocks_of(10, 1, 1.0), 2: blocks_of(6, 2, 3.0)}
    found = fewest(
        [parts[2], parts[1]], lambda part: part, lambda part: 100 - sum(s.freed_bytes for s in part), budget, 100
    )
    assert found.peak_bytes == budget and {s.freed_bytes for s in found.made} == {size}


def test_a_first_segment_that_takes_long_for_what_it_frees_does_not_run_again():
    """All but the first free 16 of 24 bytes in 18 s."""
    parts = [o._replace(time_s=9.0 if o.storage < 10 else 1.0) for o in blocks(3)]
    divisions = divided([*parts, Operator("end", 99, 18, 18, 18, -1)])
    found = fewest(divisions, list, lambda some: 100 - sum(s.freed_bytes for s in some), 84, 100)
    assert [segment.operators[-1] for segment in found.made] == ["block 10", "block 20"]


@pytest.mark.parametrize("peaks", [(100, 90, 80, 70, 60), (100, 99, 98, 97, 60), (100, 61, 62, 63, 60)])
def test_divisions_that_take_longer_are_not_made(peaks):
    """Counts are found whatever the peaks are: of segments that free as many bytes as expected, late, or early. Only
    where the quick ones are late, a slow one is tried as well."""
    tried = []

    def made(parts):
        tried.append(parts)
        return len(parts)

    quick, slow = blocks_of(4, 10, 1.0), blocks_of(4, 10, 2.0)
    for budget in range(60, 100):
        tried.clear()
        found = fewest([slow, quick], made, peaks.__getitem__, budget, 100)
        fits = [peaks[count] <= budget for count in range(5)]
        assert fits[found.count] and not fits[found.count - 1] and found.peak_bytes == peaks[found.count]
        late = peaks[3] == 97
        assert len(tried) <= 4 + late and [part[0].time_s for part in tried].count(2.0) <= late
        assert quick[: found.count] in tried


def test_a_division_with_which_the_peak_stays_is_left():
    """The peak falls by 20 at most where segments take 1 s, as another part of the step has it."""
    tried, quick, slow = [], blocks_of(8, 10, 1.0), blocks_of(8, 10, 5.0)

    def peak(parts):
        tried.append(parts)
        return 100 - (min(20, 10 * len(parts)) if parts[0].time_s == 1.0 else 9 * len(parts))

    found = fewest([quick, slow], list, peak, 60, 100)
    assert (found.peak_bytes, found.made) == (55, slow[:5])
    assert [(part[0].time_s, len(part)) for part in tried] == [(1.0, 4), (1.0, 8), (5.0, 8), (5.0, 5), (5.0, 4)]


def test_where_nothing_fits_the_least_peak_is_told():
    divisions = blocks_of(2, 10, 1.0), blocks_of(3, 9, 1.0)
    found = fewest(divisions, list, lambda parts: 100 - sum(s.freed_bytes for s in parts), 50, 100)
    assert (found.peak_bytes, found.count) == (73, 3)


@pytest.mark.parametrize("first", range(0, 500, 100))
def test_no_segments_are_made_twice_and_what_fits_is_found(first):
    """Peaks are random: no quicker segments that were tried fit, and that of all segments of a division, where it fits,
    is not missed."""
    for seed in range(first, first + 100):
        draw = random.Random(seed)
        sizes = [[draw.choice([-5, 0, 5, 30]) for _ in range(draw.randint(1, 8))] for _ in range(draw.randint(1, 5))]
        divisions = [[Segment((f"{i}",), (), s, draw.choice([1.0, 2.0])) for s in each] for i, each in enumerate(sizes)]
        peaks = {(i, n): draw.randint(0, 120) for i, each in enumerate(sizes) for n in range(1, len(each) + 1)}
        budget, tried = draw.randint(0, 99), {}

        def made(parts, tried=tried):
            key = int(parts[0].operators[0]), len(parts)
            assert key not in tried
            tried[key] = sum(part.time_s for part in parts)
            return key

        found = fewest(divisions, made, peaks.__getitem__, budget, 100)
        wholes = [(i, len(each)) for i, each in enumerate(sizes)]
        assert found.peak_bytes == peaks[found.made] and found.count == found.made[1]
        assert found.peak_bytes <= max(budget, min(peaks[key] for key in (*wholes, *tried)))
        quickest = min((time_s for key, time_s in tried.items() if peaks[key] <= budget), default=tried[found.made])
        assert tried[found.made] == quickest


def test_time_is_of_what_runs_again():
    """Neither what stays nor what is kept behind the segment runs again."""
    parts = [o._replace(time_s=None if o.name == "inner 11" else 1.0) for o in blocks(3)]
    found = segments([*parts, Operator("end", 99, 18, 18, 18, -1)], 9)
    assert [segment.time_s for segment in found] == [9.0, 8.0, 9.0]
    assert [len(segment.operators) for segment in found] == [10, 9, 10]
    assert [segment.freed_bytes for segment in found] == [8] * 3
