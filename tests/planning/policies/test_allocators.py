"""Allocators over hand-made lifetimes and over drawn ones; Gist Fig. 7's example."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.allocators import dynamic_bytes, feature_maps, investigation_bytes, static_sharing, turn_of
from gistkit.ir.plan import Plan
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import cost_table
from gistkit.planning.policies.gist_rules import gist
from gistkit.planning.simulate.intervals import Interval
from gistkit.planning.simulate.simulator import Simulator
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


def test_gist_shrinks_what_is_shared():
    graph = pooled(channels=8)
    costs = cost_table(graph, hardware("cpu"))
    plain = feature_maps(graph, Simulator(graph, costs).profile(Plan("plain", graph.fingerprint, (), ())))
    coded = feature_maps(graph, Simulator(graph, costs).profile(gist(graph)))
    kinds = {graph.blocks[i.block].kind for i in plain}
    assert kinds == {"activation", "gradient"}
    turn = turn_of(graph)
    assert graph.tasks[turn].phase == "backward" and graph.tasks[turn - 1].phase == "forward"
    for lives in (plain, coded):
        assert dynamic_bytes(lives) <= static_sharing(lives).total_bytes <= investigation_bytes(lives, turn)
    assert static_sharing(coded).total_bytes < static_sharing(plain).total_bytes
    assert investigation_bytes(coded, turn) < investigation_bytes(plain, turn)
