"""Sub-batches of a captured step against a second capture at the smaller batch."""

from dataclasses import replace

import pytest

from gistkit.ir.scale import goes_as, scaled
from tests.support.step_graphs import forked, pooled


@pytest.mark.parametrize("build", [pooled, forked])
def test_two_steps_tell_every_size(build):
    small, whole = build(batch=1), build(batch=8)
    assert goes_as(small, whole)
    # no multiples of the batch, which shapes could be asked for
    whole = replace(whole, batch=9, small=replace(small, batch=2))
    found, expected = scaled(whole, 2), build(batch=4)
    assert found.batch == 5 and found.values == expected.values and found.calls == expected.calls
    assert found.tasks == expected.tasks
    for a, b in zip(found.storages, expected.storages, strict=True):
        assert a == b or a.kind == "input"

    def blocks(graph):  # but for the batch, which the caller holds whole
        return [b for b in graph.blocks if b.kind != "input"]

    assert blocks(found) == blocks(expected)
    assert blocks(scaled(found, 2)) == blocks(scaled(whole, 3)), "of 3 rows, from 5 or from 9"


def test_a_step_that_goes_another_way_tells_nothing():
    whole, small = pooled(batch=8), pooled(batch=1)
    assert not goes_as(replace(small, tasks=small.tasks[:-1]), whole)
    assert not goes_as(replace(small, blocks=(*small.blocks[:-1], replace(small.blocks[-1], last=0))), whole)
    assert not goes_as(forked(batch=1), whole)


def test_parts_are_checked():
    graph = pooled(batch=4)
    for wrong in (0, 5, 2.0, -1):
        with pytest.raises(ValueError, match="parts must be an int from 1 to the batch size 4, got"):
            scaled(graph, wrong)
    with pytest.raises(ValueError, match="a step of at most 2 rows for 2 parts, got none; capture one"):
        scaled(replace(graph, small=None), 2)
    with pytest.raises(ValueError, match="a step of at most 1 rows for 4 parts, got one of 2 rows"):
        scaled(replace(graph, small=pooled(batch=2)), 4)
