"""Cuts of a forward into segments, as data."""

import pytest

from gistkit.planning.segments import Operator, fewest, segments


def blocks(count):
    """Blocks of nine operators whose results are kept until the tenth, which is all that the next block reads."""
    found = []
    for first in range(0, 10 * count, 10):
        found += [Operator(f"inner {first + i}", first + i, 1, True, first + 9) for i in range(9)]
        found.append(Operator(f"block {first}", first + 9, 1, False, first + 18))
    return found


@pytest.mark.parametrize(("factor", "saved"), [(9, ["block 0", "block 10", "block 20"]), (18, ["block 10"]), (30, [])])
def test_a_forward_is_cut_where_little_crosses(factor, saved):
    operators = blocks(3)
    found = segments([*operators, Operator("end", 99, 1, True, -1)], factor)
    assert [name for segment in found for name in segment.saved] == saved
    names = [name for segment in found for name in segment.operators]
    assert names == [o.name for o in operators[: len(names)]]


def test_no_cut_is_made_where_something_crosses_that_is_no_tensor():
    pair = [Operator("pair", None, 0, False, 25), *blocks(2), Operator("end", 99, 1, True, -1)]
    assert segments(pair, 9) == []


@pytest.mark.parametrize(("needed", "count"), [(1, 1), (5, 5), (8, 8), (9, 8)])
def test_as_few_segments_as_fit(needed, count):
    tried = []

    def made(parts):
        tried.append(len(parts))
        return len(parts)

    assert fewest(list(range(8)), made, lambda size: size >= needed) == (count, count)
    assert len(tried) <= 4
