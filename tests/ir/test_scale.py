"""Sub-batches of a captured step against a second capture at the smaller batch."""

from dataclasses import replace

import pytest

from gistkit.ir.scale import goes_as, scaled
from tests.support.step_graphs import forked, pooled


@pytest.mark.parametrize("build", [pooled, forked])
def test_scaled_is_the_smaller_step(build):
    whole, small = scaled(build(batch=8), 4), build(batch=2)
    assert whole.batch == 2 and whole.fingerprint == small.fingerprint
    images = {s.id for s in small.storages if s.kind == "input"}
    for a, b in zip(whole.blocks, small.blocks, strict=True):
        assert a.storage in images or a == (replace(b, nbytes=a.nbytes) if b.nbytes == 4 else b)
    assert [s for s in whole.storages if s.id not in images] == [s for s in small.storages if s.id not in images]
    assert [v for v in whole.values if v.storage not in images] == [v for v in small.values if v.storage not in images]
    for a, b in zip(whole.tasks, small.tasks, strict=True):
        assert (a.flops, a.conv) == (b.flops, b.conv)
        # reads of the whole input batch and of single numbers are no share of theirs
        assert a.moved_bytes == b.moved_bytes or a.op in ("mean", "conv2d", "batch_norm")


@pytest.mark.parametrize("build", [pooled, forked])
def test_two_steps_tell_every_size(build):
    small, whole = build(batch=1), build(batch=8)
    assert goes_as(small, whole)
    # no multiples of the batch, which shapes could be asked for
    whole = replace(whole, batch=9, least_rows=2, small=replace(small, batch=2))
    found, expected = scaled(whole, 2), build(batch=4)
    assert found.batch == 5 and found.values == expected.values and found.calls == expected.calls
    assert found.tasks == expected.tasks
    for a, b in zip(found.storages, expected.storages, strict=True):
        assert a == b or a.kind == "input"

    def blocks(graph):  # but for the batch, which the caller holds whole
        return [b for b in graph.blocks if b.kind != "input"]

    assert blocks(found) == blocks(expected)
    assert blocks(scaled(found, 2)) == blocks(scaled(whole, 3)), "of 3 rows, from 5 or from 9"
    smaller = build(batch=2)
    again = scaled(scaled(replace(build(batch=8), small=smaller), 4), 2)
    assert blocks(again) == blocks(scaled(smaller, 2)), "of less than the smaller step's rows: by shape"


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
