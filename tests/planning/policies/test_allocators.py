"""Allocators over hand-made lifetimes and over drawn ones; Gist Fig. 7's example; moDNN Fig. 4's search."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.allocators import dynamic_bytes, feature_maps, investigation_bytes, replay, static_sharing, turn_of
from gistkit.errors import PlanError
from gistkit.ir.plan import Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.simulate.effects import profile
from gistkit.planning.simulate.intervals import Interval
from gistkit.planning.simulate.memory_map import MemoryMap
from tests.support.step_graphs import pooled

MB = 10**6


def life(first, last, megabytes, block=0, what="dense"):
    return Interval(first, last, megabytes * MB, block, what)


def test_gist_figure_7():
    """Section IV-C: X is stashed, A to D are consumed at once, one after the other; SSDC encodes X."""
    consumed = [life(1, 1, 8, 1), life(2, 3, 6, 2), life(4, 5, 4, 3), life(6, 6, 7, 4)]
    baseline = static_sharing([life(0, 7, 10), *consumed])
    assert baseline.total_bytes == 18 * MB
    assert [[i.block for i in group] for group in baseline.groups] == [[0], [1, 4, 2, 3]]
    encoded = static_sharing([life(0, 0, 10), life(0, 7, 2, what="payload"), life(7, 7, 10), *consumed])
    assert encoded.total_bytes == 12 * MB
    assert [group[0].nbytes for group in encoded.groups] == [10 * MB, 2 * MB]


def test_investigation_baseline_shares_no_stashed_maps():
    stashed = [life(0, 9, 3, 0), life(1, 5, 2, 1)]
    consumed = [life(2, 2, 5, 2), life(7, 8, 4, 3), life(8, 9, 1, 4)]
    assert investigation_bytes([*stashed, *consumed], turn=5) == (3 + 2 + 5 + 1) * MB
    assert static_sharing([*stashed, *consumed]).total_bytes == (5 + 3 + 2) * MB
    assert dynamic_bytes([*stashed, *consumed]) == 10 * MB


LIVES = st.lists(
    st.tuples(st.integers(-1, 12), st.integers(0, 8), st.integers(1, 20)).map(
        lambda t: Interval(t[0], t[0] + t[1], t[2], 0, "dense")
    ),
    max_size=14,
)


@given(LIVES)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_laws_of_sharing(lives):
    shared = static_sharing(lives)
    assert sorted(i for g in shared.groups for i in g) == sorted(lives)
    for group in shared.groups:
        ordered = sorted(group)
        assert all(a.last < b.first for a, b in pairwise(ordered))
        assert group[0].nbytes == max(i.nbytes for i in group)
    peak = max((sum(i.nbytes for i in lives if i.first <= t <= i.last) for t in range(-1, 22)), default=0)
    assert dynamic_bytes(lives) == peak <= shared.total_bytes <= investigation_bytes(lives, turn=5)


@given(LIVES, st.sampled_from(("first", "best")))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_replay_fits_where_the_peak_fits(lives, fit):
    free = replay(lives, fit=fit)
    assert free.defragmentations == 0 and free.peak_bytes == dynamic_bytes(lives) <= free.extent_bytes
    tight = replay(lives, max(1, free.peak_bytes), fit)
    assert tight.extent_bytes == free.peak_bytes
    if free.peak_bytes > 1:
        with pytest.raises(PlanError, match=r"does not fit, \d+ of \d+ bytes are free; give more memory"):
            replay(lives, free.peak_bytes - 1, fit)


def test_replay_defragments():
    lives = [Interval(0, 1, 4, 0, "dense"), Interval(0, 3, 3, 1, "dense"), Interval(2, 3, 6, 2, "dense")]
    done = replay(lives, 10)
    # 4 | 3 | 3 free; after the 4 is freed there are 4 + 3 free bytes in two pieces
    assert (done.defragmentations, done.moved_bytes, done.extent_bytes) == (1, 3, 9)
    assert replay(lives).extent_bytes == 13


def test_memory_map_splits_and_merges():
    space = MemoryMap(10)
    assert [space.allocate(k, n) for k, n in (("a", 2), ("b", 3), ("c", 4))] == [0, 2, 5]
    space.free("a")
    assert list(space.segments()) == [(0, 2, None), (2, 3, "b"), (5, 4, "c"), (9, 1, None)]
    assert (space.free_bytes, space.largest_free_bytes, space.extent_bytes) == (3, 2, 9)
    assert space.fragmentation == pytest.approx(1 / 3)
    assert space.allocate("d", 3) is None and "d" not in space
    space.free("c")
    assert list(space.segments()) == [(0, 2, None), (2, 3, "b"), (5, 5, None)]
    space.free("b")
    assert list(space.segments()) == [(0, 10, None)]
    assert MemoryMap(7).defragment() == 0


def test_best_fit_takes_the_smallest():
    def holes():
        space = MemoryMap(20)
        for key, nbytes in (("a", 5), ("b", 1), ("c", 2), ("d", 1)):
            space.allocate(key, nbytes)
        space.free("a")
        space.free("c")
        return space

    assert holes().allocate("x", 2) == 0
    assert holes().allocate("x", 2, "best") == 6


def test_defragment_keeps_order_and_says_what_moved():
    space = MemoryMap(10)
    for key, nbytes in (("a", 2), ("b", 3), ("c", 4)):
        space.allocate(key, nbytes)
    space.free("b")
    assert space.fragmentation > 0
    assert space.defragment() == 4
    assert list(space.segments()) == [(0, 2, "a"), (2, 4, "c"), (6, 4, None)]
    assert space.fragmentation == 0 and space.allocate("d", 4) == 6 and space.fragmentation == 0
    space.free("c")
    assert [s.key for s in space.segments()] == ["a", None, "d"]


def test_modnn_figure_4():
    """Section IV-B1: block 4 must stay; for an allocation of 4 there are the schemes (1)(2) and (5)(6)."""
    space = MemoryMap(16)
    for key, nbytes in ((1, 2), (2, 2), (3, 3), (4, 4), (5, 2), (6, 2), (7, 1)):
        space.allocate(key, nbytes)
    assert set(space.runs(4, lambda k: k not in (3, 4, 7))) == {(1, 2), (5, 6)}
    space.free(2)
    assert set(space.runs(4, lambda k: k not in (3, 4, 7))) == {(1,), (5, 6)}
    assert set(space.runs(2, lambda k: False)) == {()}
    assert not list(space.runs(99, lambda k: True))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=30), st.sampled_from(("first", "best")))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_memory_map_is_a_partition(moves, fit):
    space = MemoryMap(24)
    for key, nbytes in moves:
        if key in space:
            space.free(key)
        elif key == 5:
            space.defragment()
        else:
            room = space.largest_free_bytes
            assert (space.allocate(key, nbytes, fit) is not None) == (nbytes <= room)
        found, twin = list(space.segments()), space.copy()
        assert list(twin.segments()) == found
        twin.defragment()
        for segment in found:
            if segment.key is not None:
                twin.free(segment.key)
        assert twin.free_bytes == 24
        assert list(space.segments()) == found
        assert [s.start for s in found] == [sum(s.nbytes for s in found[:i]) for i in range(len(found))]
        assert sum(s.nbytes for s in found) == 24
        assert not any(a.key is None and b.key is None for a, b in pairwise(found))


def test_errors_of_the_map():
    space = MemoryMap(4)
    space.allocate("a", 2)
    with pytest.raises(ValueError, match="key must be new"):
        space.allocate("a", 1)
    with pytest.raises(ValueError, match="fit one of first, best"):
        space.allocate("b", 1, "worst")
    with pytest.raises(ValueError, match="no segment 'z' is allocated"):
        space.free("z")
    with pytest.raises(ValueError, match="capacity_bytes must be at least 1, got 0"):
        MemoryMap(0)


def test_gist_shrinks_what_is_shared():
    graph = pooled(channels=8)
    costs = cost_table(graph, hardware("cpu"))
    plain = feature_maps(graph, profile(graph, Plan("plain", graph.fingerprint, (), ()), costs))
    coded = feature_maps(graph, profile(graph, gist(graph), costs))
    kinds = {graph.blocks[i.block].kind for i in plain}
    assert kinds == {"activation", "gradient"}
    turn = turn_of(graph)
    assert graph.tasks[turn].phase == "backward" and graph.tasks[turn - 1].phase == "forward"
    for lives in (plain, coded):
        assert dynamic_bytes(lives) <= static_sharing(lives).total_bytes <= investigation_bytes(lives, turn)
    assert static_sharing(coded).total_bytes < static_sharing(plain).total_bytes
    assert investigation_bytes(coded, turn) < investigation_bytes(plain, turn)
